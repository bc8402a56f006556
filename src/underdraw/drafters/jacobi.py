"""Speculative Jacobi decoding (SJD): no training, no weights, any model.

The target's choices at the nodes after the accepted path were made in a partly wrong context, but with the right noise.
They are good guesses for the same steps in the next pass. Steps without a guess start from an initial one.

Under the `sampled` proposal it is SJD as published: in every pass the guesses are sampled anew, with noise of their
own, from the target's distribution at the previous node, and that distribution is kept as q for the test u < p / q. An
initial guess was not sampled; its q is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.plan import MAX_NODES
from underdraw.protocols import CapturableDraft, DraftRequest, Guidance, PrefillOutput, Prompt, VerifiedStep
from underdraw.tree import DraftTree, Proposal, chain

Init = Literal["left", "above", "random"]


@dataclass(frozen=True, slots=True)
class Jacobi:
    """Guesses at most `window` tokens ahead, fewer where the plan is less deep.

    `init` is the initial guess of a step: the token to its left, the one above (left in the first row), or a random
    code.
    """

    proposes: ClassVar[Literal["chain"]] = "chain"
    mixes_sizes: ClassVar[bool] = True

    window: int = 32
    init: Init = "above"

    def __post_init__(self) -> None:
        if not 1 <= self.window < MAX_NODES:
            raise ConfigError(f"a jacobi window of {self.window} tokens is impossible; use 1 to {MAX_NODES - 1}.")

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> JacobiSession:
        return JacobiSession(self, layout, len(prompts), prefill.logits.device)


class JacobiSession(CapturableDraft):
    """The guesses for all steps to come; a guess lasts until its step is committed."""

    def __init__(self, drafter: Jacobi, layout: Layout, batch: int, device: torch.device) -> None:
        self.drafter, self.layout = drafter, layout
        # (B, steps + MAX_NODES) token ids, committed ones included; -1 where there is no guess
        self.guesses = torch.full((batch, layout.steps + MAX_NODES), -1, dtype=torch.int64, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)  # (B,) of the last root
        self.proposal: Proposal = "coupled"  # of the last request
        self.passes = torch.zeros(1, dtype=torch.int64, device=device)  # that resampled: selects their noise
        self.sampled_from: GuessDistributions | None = None  # under the `sampled` proposal

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if len(prompts) != self.guesses.shape[0]:
            return False
        self.guesses.fill_(-1)
        self.passes.zero_()
        if self.sampled_from is not None:
            self.sampled_from.is_valid.fill_(False)
        return True

    def copy_slots(self, source: JacobiSession, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        count = min(self.guesses.shape[1], source.guesses.shape[1])  # they may be of another size
        self.guesses[list(slots)] = -1
        self.guesses[list(slots), :count] = source.guesses[list(source_slots), :count]
        if self.sampled_from is None and source.sampled_from is not None:
            self.sampled_from = GuessDistributions.empty_like(
                source.sampled_from.probs[:1].expand(len(self.guesses), -1, -1)
            )
        if self.sampled_from is not None:
            self.sampled_from.copy_slots(source.sampled_from, list(source_slots), list(slots))
        self.passes.copy_(torch.maximum(self.passes, source.passes))

    def draft(self, request: DraftRequest) -> DraftTree:
        self.steps, self.proposal = request.steps, request.proposal
        self.guesses.scatter_(1, request.steps[:, None], request.root[:, None])
        depth = min(request.plan.depth, self.drafter.window)
        index = torch.arange(depth + 1, device=request.root.device)
        steps = request.steps[:, None] + index[1:]  # (B, depth)
        guesses = self.guesses.gather(1, steps)
        guesses = torch.where(guesses >= 0, guesses, self._initial_guesses(request, steps))
        tokens = torch.cat([request.root[:, None], guesses], dim=1)
        # Where there is still no token, copy the last one to the left.
        source = torch.where(tokens >= 0, index, 0).cummax(1).values  # (B, depth + 1)
        tokens = tokens.gather(1, source)
        tree = chain(tokens, None if request.limits is None else request.limits.depth)
        return replace(tree, q=self._draft_probs(tree)) if request.proposal == "sampled" else tree

    def _draft_probs(self, tree: DraftTree) -> Tensor:
        """The distribution q of the child of each node (B, N, V): of the last pass, or 1 at an initial guess."""
        child = self.layout.vocab_indices(tree.tokens.roll(-1, 1))  # (B, N); that of the last node is not used
        one_hot = torch.zeros(*child.shape, self.layout.vocab_size, device=child.device)
        one_hot.scatter_(2, child[..., None], 1.0)
        if self.sampled_from is None:
            self.sampled_from = GuessDistributions.empty_like(one_hot)
        saved = self.sampled_from
        node = (self.steps - saved.roots)[:, None] + torch.arange(tree.size, device=child.device)
        index = node.clamp(0, MAX_NODES - 1)
        is_valid = saved.is_valid.gather(1, index) & (node == index)
        probs = saved.probs.gather(1, index[..., None].expand(-1, -1, self.layout.vocab_size))
        return torch.where(is_valid[..., None], probs, one_hot)

    def _initial_guesses(self, request: DraftRequest, steps: Tensor) -> Tensor:
        """Token ids for the steps (B, D); -1 stands for the token to the left."""
        layout, init = self.layout, self.drafter.init
        if init == "random":
            tokens = request.noise_window.sampler.random_tokens(steps)
        else:
            # To the left of a row's first cell is a row end, which is no code: take the root instead.
            tokens = torch.where(layout.is_row_end(steps - 1), request.root[:, None], -1)
        if init == "above":
            above_step, is_inside = layout.neighbour(steps, -1, 0)
            above = self.guesses.gather(1, above_step.clamp(min=0))
            tokens = torch.where(is_inside & (above >= 0), above, tokens)
        if layout.row_end is None:
            return tokens
        return torch.where(layout.is_row_end(steps), layout.row_end, tokens)

    def commit(self, verified: VerifiedStep) -> None:
        """Keep the target's choice at each node of the chain as the guess for the step after it."""
        depths, chosen = verified.tree.depths, verified.accepted_path.chosen  # (B, N)
        if self.proposal == "sampled":
            choices = self.layout.token_ids(self._resample(verified))
        elif chosen is not None:
            choices = chosen
        else:
            choices = self.layout.token_ids(verified.noise_window.sample(verified.output.logits, depths + 1))
        steps = self.steps[:, None] + 1 + torch.arange(depths.shape[1], device=depths.device)
        self.guesses.scatter_(1, steps, torch.where(depths >= 0, choices, self.guesses.gather(1, steps)))

    def _resample(self, verified: VerifiedStep) -> Tensor:
        """New guesses (B, N), as vocabulary indices, for the steps after the chain's nodes; saves their q."""
        depths, noise_window = verified.tree.depths, verified.noise_window
        scaled = noise_window.filtered_logits(verified.output.logits, depths + 1)
        self.passes.add_(1)
        if noise_window.noise is None:  # greedy
            guesses = scaled.argmax(-1)
            probs = torch.zeros_like(scaled).scatter_(-1, guesses[..., None], 1.0)
        else:
            noise = noise_window.gumbel("draft", self.passes)  # (B, window, V); nodes behind the window are padding
            row = torch.arange(depths.shape[1], device=depths.device).clamp(max=noise.shape[1] - 1)
            guesses = (scaled + noise[:, row]).argmax(-1)
            probs = scaled.softmax(-1)
        assert self.sampled_from is not None, "a chain is drafted before it is verified"
        self.sampled_from.fill(probs, depths >= 0, self.steps)
        # Accepted tokens stay: the cells below them start from them.
        index = torch.arange(depths.shape[1], device=depths.device)
        accepted = self.layout.vocab_indices(verified.tree.tokens.roll(-1, 1))
        return torch.where(index + 1 < verified.counts[:, None], accepted, guesses)


@dataclass(frozen=True, slots=True)
class GuessDistributions:
    """The distributions that the guesses of the last pass were sampled from, in tensors that are never reallocated."""

    probs: Tensor  # (B, MAX_NODES, V) at each node of the chain
    is_valid: Tensor  # (B, MAX_NODES) whether the chain had the node
    roots: Tensor  # (B,) step of the chain's root

    @classmethod
    def empty_like(cls, probs: Tensor) -> GuessDistributions:
        """No valid node yet, for distributions like `probs` (B, N, V)."""
        batch, _, vocab_size = probs.shape
        is_valid = torch.zeros(batch, MAX_NODES, dtype=torch.bool, device=probs.device)
        roots = torch.zeros_like(is_valid[:, 0], dtype=torch.int64)
        return cls(probs.new_zeros(batch, MAX_NODES, vocab_size), is_valid, roots)

    def copy_slots(self, source: GuessDistributions | None, source_slots: list[int], slots: list[int]) -> None:
        """Overwrite images `slots` by images `source_slots`; without a source no node is valid."""
        self.is_valid[slots] = False
        if source is not None:
            self.probs[slots] = source.probs[source_slots]
            self.is_valid[slots] = source.is_valid[source_slots]
            self.roots[slots] = source.roots[source_slots]

    def fill(self, probs: Tensor, is_valid: Tensor, roots: Tensor) -> None:
        count = probs.shape[1]
        self.probs[:, :count].copy_(probs)
        self.is_valid.fill_(False)
        self.is_valid[:, :count].copy_(is_valid)
        self.roots.copy_(roots)
