"""Speculative Jacobi decoding: no training, no weights, any model.

The target's choices at the nodes behind the accepted path were made in a context that was partly wrong, but with the
right noise: they are good guesses for the same steps in the next pass. New steps start from an initial guess.

Under the `sampled` proposal it is SJD as published: guesses are drawn anew in every pass from the target's law at the
node before, by noise of their own, and that law is kept as q for the test u < p / q. An initial guess was picked, not
drawn; its q is 1.
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
from underdraw.protocols import CapturableDraft, DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.tree import DraftTree, Proposal, chain

Init = Literal["left", "above", "random"]


@dataclass(frozen=True, slots=True)
class Jacobi:
    """At most `window` tokens are guessed ahead, fewer where the tree is less deep; `init` says from where a step
    starts: the token to its left, the one above (left in the first row), or a random code."""

    proposes: ClassVar[Literal["chain"]] = "chain"

    window: int = 32
    init: Init = "above"

    def __post_init__(self) -> None:
        if not 1 <= self.window < MAX_NODES:
            raise ConfigError(f"a jacobi window of {self.window} tokens is impossible; use 1 to {MAX_NODES - 1}.")

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> JacobiSession:
        return JacobiSession(self, layout, len(prompts), prefill.logits.device)


class JacobiSession(CapturableDraft):
    """Guesses for every step to come; a guess lasts until its step is committed."""

    def __init__(self, drafter: Jacobi, layout: Layout, batch: int, device: torch.device) -> None:
        self.drafter, self.layout = drafter, layout
        self.guess = torch.full((batch, layout.steps + MAX_NODES), -1, dtype=torch.int64, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)  # (B,) of the last root
        self.proposal: Proposal = "coupled"  # of the last request
        self.passes = torch.zeros(1, dtype=torch.int64, device=device)  # in which guesses were drawn anew
        self.drawn: _Drawn | None = None

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if len(prompts) != self.guess.shape[0]:
            return False
        self.guess.fill_(-1)
        self.passes.zero_()
        if self.drawn is not None:
            self.drawn.valid.fill_(False)
        return True

    def draft(self, request: DraftRequest) -> DraftTree:
        self.steps, self.proposal = request.steps, request.proposal
        self.guess.scatter_(1, request.steps[:, None], request.root[:, None])
        depth = min(request.plan.depth, self.drafter.window)
        order = torch.arange(depth + 1, device=request.root.device)
        steps = request.steps[:, None] + order[1:]  # (B, depth)
        kept = self.guess.gather(1, steps)
        guesses = torch.where(kept >= 0, kept, self._initial(request, steps))
        tokens = torch.cat([request.root[:, None], guesses], dim=1)
        last = torch.where(tokens >= 0, order, 0).cummax(1).values  # (B, depth + 1) the last place that has a token
        tokens = tokens.gather(1, last)
        room = request.limits.depth if request.limits is not None else None
        tree = chain(tokens, room)
        return replace(tree, q=self._chances(tree)) if request.proposal == "sampled" else tree

    def _chances(self, tree: DraftTree) -> Tensor:
        """What the child of each node was drawn from (B, N, columns): a law of the last pass, or 1 at a picked one."""
        child = self.layout.vocab_indices(tree.tokens.roll(-1, 1))  # (B, N); the last node has none
        picked = torch.zeros(*child.shape, self.layout.vocab_size, device=child.device)
        picked.scatter_(2, child[..., None], 1.0)
        if self.drawn is None:
            self.drawn = _Drawn.none(picked)
        place = (self.steps - self.drawn.roots)[:, None] + torch.arange(tree.size, device=child.device)
        inside = place.clamp(0, MAX_NODES - 1)
        valid = self.drawn.valid.gather(1, inside) & (place == inside)
        token_stats = self.drawn.token_stats.gather(1, inside[..., None].expand(-1, -1, self.layout.vocab_size))
        return torch.where(valid[..., None], token_stats, picked)

    def _initial(self, request: DraftRequest, steps: Tensor) -> Tensor:
        """Where the steps (B, D) start from: tokens, -1 for the one to the left, whatever that will be."""
        layout, init = self.layout, self.drafter.init
        if init == "random":
            tokens = request.noise_window.sampler.random_tokens(steps)
        else:
            tokens = torch.where(
                layout.is_row_end(steps - 1), request.root[:, None], -1
            )  # no row end stands in for a code
        if init == "above":
            place, inside = layout.neighbour(steps, -1, 0)
            above = self.guess.gather(1, place.clamp(min=0))
            tokens = torch.where(inside & (above >= 0), above, tokens)
        if layout.row_end is None:
            return tokens
        return torch.where(layout.is_row_end(steps), layout.row_end, tokens)

    def commit(self, verified: VerifiedStep) -> None:
        """Keep what the target chose at each node of the chain as the guess for the step after it."""
        depths, chosen = verified.tree.depths, verified.accepted_path.chosen  # (B, N)
        if self.proposal == "sampled":
            choices = self.layout.token_ids(self._redraw(verified))
        elif chosen is not None:
            choices = chosen
        else:
            choices = self.layout.token_ids(verified.noise_window.sample(verified.output.logits, depths + 1))
        steps = self.steps[:, None] + 1 + torch.arange(depths.shape[1], device=depths.device)
        self.guess.scatter_(1, steps, torch.where(depths >= 0, choices, self.guess.gather(1, steps)))

    def _redraw(self, verified: VerifiedStep) -> Tensor:
        """New guesses (B, N), as columns, for the steps after the nodes of the chain; their laws are remembered."""
        depths, noise_window = verified.tree.depths, verified.noise_window
        scaled = noise_window.filtered_logits(verified.output.logits, depths + 1)
        self.passes.add_(1)
        if noise_window.noise is None:
            columns = scaled.argmax(-1)
            token_stats = torch.zeros_like(scaled).scatter_(-1, columns[..., None], 1.0)
        else:
            noise = noise_window.gumbel("draft", self.passes)  # (B, reach, columns); what is behind it is padding
            row = torch.arange(depths.shape[1], device=depths.device).clamp(max=noise.shape[1] - 1)
            columns = (scaled + noise[:, row]).argmax(-1)
            token_stats = scaled.softmax(-1)
        assert self.drawn is not None, "what is judged was drafted before"
        self.drawn.fill(token_stats, depths >= 0, self.steps)
        # What was accepted is no guess any more; the cells below start from it.
        order = torch.arange(depths.shape[1], device=depths.device)
        accepted = self.layout.vocab_indices(verified.tree.tokens.roll(-1, 1))
        return torch.where(order + 1 < verified.counts[:, None], accepted, columns)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What the guesses of the last pass were drawn from, in tensors that stay where they are."""

    token_stats: Tensor  # (B, MAX_NODES, columns) at each node of the chain
    valid: Tensor  # (B, MAX_NODES) where the chain had a node
    roots: Tensor  # (B,) step of the chain's root

    @classmethod
    def none(cls, like: Tensor) -> _Drawn:
        """Nothing yet; `like` (B, N, columns) is one of the laws to come."""
        batch, _, columns = like.shape
        valid = torch.zeros(batch, MAX_NODES, dtype=torch.bool, device=like.device)
        return cls(like.new_zeros(batch, MAX_NODES, columns), valid, torch.zeros_like(valid[:, 0], dtype=torch.int64))

    def fill(self, token_stats: Tensor, valid: Tensor, roots: Tensor) -> None:
        count = token_stats.shape[1]
        self.token_stats[:, :count].copy_(token_stats)
        self.valid.fill_(False)
        self.valid[:, :count].copy_(valid)
        self.roots.copy_(roots)
