"""The block drafter: all future cells in one pass, one slot a cell, each with the row above it.

The slots' logits are marginal: a slot does not know which tokens were drafted before it. A small Markov head mends
that: it corrects a slot's logits by the one token that stands before the slot on the path. So a level of the tree
costs a thin matrix, however large the drafter is, and depth is nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from underdraw.calibration import Calibration
from underdraw.drafters.eagle import Eagle, EagleNet, EagleSession, above_tokens
from underdraw.layout import Layout
from underdraw.nn.row_invariant import Linear
from underdraw.nn.target import apply_guidance
from underdraw.nn.transformer import Arch
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt
from underdraw.tree import ExpandFn, Frontier


class BlockNet(EagleNet):
    """An EAGLE net whose inputs are the committed tokens alone, and `slots` queries for the cells to come."""

    def __init__(self, arch: Arch, feature_dim: int, *, slots: int, markov_dim: int) -> None:
        super().__init__(arch, feature_dim, above=True)
        self.slots = nn.Parameter(torch.randn(slots, arch.dim) * 0.02)
        self.slot_above = Linear(2 * arch.dim, arch.dim, bias=False)
        self.markov_feature = Linear(arch.dim, markov_dim)
        self.markov_token = Linear(arch.dim, markov_dim, bias=False)
        self.markov_out = Linear(markov_dim, self.body.head.weight.shape[0], bias=False)

    def queries(self, above: Tensor) -> Tensor:
        """above (R, D, 2) token ids of the cells to come -> slot inputs (R, D, dim)."""
        return self.slots[: above.shape[1]] + self.slot_above(self.embed_above(above))

    def tokens(self, tokens: Tensor) -> Tensor:
        """What the tokens (..., W) before a slot say to it: (..., W, markov_dim)."""
        return self.markov_token(self.body.embed(tokens).to(self.markov_token.weight.dtype))

    def mixed(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """`markov_feature` of slots and `tokens` of what stands before them, joined: what `markov_out` reads."""
        return nn.functional.silu(slots + tokens)


@dataclass(frozen=True, slots=True)
class BlockDrafter:
    """A trained block drafter with the calibration of its scores."""

    proposes: ClassVar[Literal["tree"]] = "tree"

    net: BlockNet
    calibration: Calibration | None = Calibration()
    image_offset: int | None = None

    @torch.no_grad()
    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> BlockSession:
        return BlockSession(self, layout, prefill, guidance)


class BlockSession(EagleSession):
    """One pass over the slots answers every level of the tree."""

    def __init__(self, drafter: BlockDrafter, layout: Layout, prefill: PrefillOutput, guidance: float) -> None:
        super().__init__(Eagle(drafter.net, drafter.calibration, drafter.image_offset), layout, prefill, guidance)
        self.block = drafter.net
        self.ahead = torch.empty(0)  # (R, D, dim) features of the slots

    def fit(self, request: DraftRequest) -> DraftRequest:
        return replace(request, plan=request.plan.truncate(self.block.slots.shape[0]))

    def follow(self, request: DraftRequest) -> None:
        """Run the pending tokens and the slots in one pass; slots see no place at which nothing was pending."""
        pending, depth = self.pending, request.plan.depth
        assert pending is not None, "a session drafts after it was opened or committed to"
        if depth == 0:
            return super().follow(request)
        order = torch.arange(depth, device=self.offset.device)
        steps = request.steps.repeat(self.copies)[:, None] + 1 + order  # (R, D)
        slots = self.block.queries(above_tokens(self.committed, self.layout, steps, self.roots, self.copies))
        x = torch.cat([self.waiting(request.root), slots], dim=1)
        cos_sin = self.cos_sin(torch.cat([pending.steps, steps], dim=1))
        counts, width = pending.counts[:, None], pending.tokens.shape[1]
        place = torch.arange(width + depth, device=order.device)
        slot, empty = place >= width, (place >= counts) & (place < width)  # (N,), (R, N)
        before = (place[:, None] >= place) & ~(slot[:, None] & empty[:, None])  # (R, N, N)
        depths = torch.where(slot, counts + place - width, place)
        self.ahead = self.cache.append_with_nodes(x, cos_sin, pending.counts, pending.host_counts, depths, before)[
            :, -depth:
        ]
        return None

    def expander(self, request: DraftRequest) -> ExpandFn:
        net = self.block
        if request.plan.depth == 0:
            return super().expander(request)
        logits = self.logits(self.ahead)  # (B, D, K)
        slots = net.markov_feature(self.ahead)  # (R, D, markov_dim)

        def expand(level: Frontier) -> Tensor:
            place = slice(level.depth, level.depth + 1)
            told = net.tokens(level.tokens).repeat(self.copies, 1, 1)
            # Guidance is linear, so it may come before the last matrix and halve the rows there.
            return (
                logits[:, place]
                + net.markov_out(apply_guidance(net.mixed(slots[:, place], told), self.guidance)).float()
            )

        return expand
