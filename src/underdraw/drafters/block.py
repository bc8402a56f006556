"""The block drafter: one forward pass over a slot for every cell to come.

A slot's logits are marginal: they do not depend on the tokens drafted before the slot. A small Markov head corrects
them by the one token before the slot on the path. So a level of the tree costs one thin GEMM, however large the drafter
is, and depth is nearly free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from underdraw.drafters.eagle import DrafterKind, Eagle, EagleNet, EagleSession, above_tokens
from underdraw.layout import Layout
from underdraw.nn.linear import Linear
from underdraw.nn.target import apply_guidance
from underdraw.nn.transformer import Arch
from underdraw.protocols import DraftRequest, Guidance, PrefillOutput
from underdraw.tree import ExpandFn, Frontier


class BlockNet(EagleNet):
    """An EAGLE net that reads committed tokens only, followed by `slots` queries for the cells to come."""

    def __init__(self, arch: Arch, feature_dim: int, *, slots: int, markov_dim: int) -> None:
        super().__init__(arch, feature_dim, above=True)
        self.slots = nn.Parameter(torch.randn(slots, arch.dim) * 0.02)
        self.slot_above = Linear(2 * arch.dim, arch.dim, bias=False)
        self.markov_feature = Linear(arch.dim, markov_dim)
        self.markov_token = Linear(arch.dim, markov_dim, bias=False)
        self.markov_out = Linear(markov_dim, self.body.head.weight.shape[0], bias=False)

    def slot_inputs(self, above: Tensor) -> Tensor:
        """above (R, D, 2) token ids of the row above the cells to come -> (R, D, dim)."""
        return self.slots[: above.shape[1]] + self.slot_above(self.embed_above(above))

    def project_tokens(self, tokens: Tensor) -> Tensor:
        """Tokens before a slot (..., W) -> the Markov head's token input (..., W, markov_dim)."""
        return self.markov_token(self.body.embed(tokens).to(self.markov_token.weight.dtype))

    def mix(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """Input of `markov_out`, from `markov_feature` of the slots and `project_tokens` of the tokens before them."""
        return nn.functional.silu(slots + tokens)


class BlockSession(EagleSession):
    """Runs the slots of all levels together with the pending tokens."""

    def __init__(self, drafter: Eagle, layout: Layout, prefill: PrefillOutput, guidance: Guidance) -> None:
        super().__init__(drafter, layout, prefill, guidance)
        assert isinstance(drafter.net, BlockNet)
        self.block = drafter.net
        self.slot_outputs = torch.empty(0)  # (R, D, dim)

    def fit_request(self, request: DraftRequest) -> DraftRequest:
        return replace(request, plan=request.plan.truncate(self.block.slots.shape[0]))

    def append_pending(self, request: DraftRequest) -> None:
        """Run the pending tokens and the slots in one pass; slots do not attend to padding of the pending tokens."""
        pending, depth = self.pending, request.plan.depth
        assert pending is not None, "a session drafts after prefill or commit"
        if depth == 0:
            return super().append_pending(request)
        order = torch.arange(depth, device=self.offset.device)
        steps = request.steps.repeat(self.copies)[:, None] + 1 + order  # (R, D)
        slots = self.block.slot_inputs(above_tokens(self.committed, self.layout, steps, self.roots, self.copies))
        x = torch.cat([self.pending_inputs(request.root), slots], dim=1)
        cos_sin = self.cos_sin(torch.cat([pending.steps, steps], dim=1))
        counts, width = pending.counts[:, None], pending.tokens.shape[1]
        column = torch.arange(width + depth, device=order.device)
        is_slot, is_padding = column >= width, (column >= counts) & (column < width)  # (N,), (R, N)
        ancestors = (column[:, None] >= column) & ~(is_slot[:, None] & is_padding[:, None])  # (R, N, N)
        depths = torch.where(is_slot, counts + column - width, column)
        outputs = self.decoder.append_with_nodes(x, cos_sin, pending.counts, pending.host_counts, depths, ancestors)
        self.slot_outputs = outputs[:, -depth:]
        return None

    def make_expand_fn(self, request: DraftRequest) -> ExpandFn:
        net = self.block
        if request.plan.depth == 0:
            return super().make_expand_fn(request)
        logits = self.logits(self.slot_outputs)  # (B, D, K)
        slots = net.markov_feature(self.slot_outputs)  # (R, D, markov_dim)

        def expand(level: Frontier) -> Tensor:
            this_level = slice(level.depth, level.depth + 1)
            tokens = net.project_tokens(level.tokens).repeat(self.copies, 1, 1)
            # Guidance is linear, so it can be applied before the last GEMM, which halves its rows.
            mixed = apply_guidance(net.mix(slots[:, this_level], tokens), self.guidance)
            return logits[:, this_level] + net.markov_out(mixed).float()

        return expand


@dataclass(frozen=True, slots=True)
class BlockDrafter(Eagle):
    """A trained block drafter."""

    kind: ClassVar[DrafterKind] = "block"
    session_type: ClassVar[type[EagleSession]] = BlockSession
