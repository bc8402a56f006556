"""The block drafter: all future cells in one pass, one slot a cell, each with the row above it.

The slots' features are marginal: a slot does not know which tokens were drafted before it. A small Markov head mends
that: it corrects a slot's feature by the one token that stands before the slot on the path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from underdraw.calibration import Calibration
from underdraw.drafters.eagle import Eagle, EagleNet, EagleSession, above_tokens
from underdraw.layout import Layout
from underdraw.nn.linear import Linear
from underdraw.nn.transformer import Arch
from underdraw.protocols import Opening, Prompt, Request
from underdraw.tree import Expand, Level


class BlockNet(EagleNet):
    """An EAGLE net whose inputs are the committed tokens alone, and `slots` queries for the cells to come."""

    def __init__(self, arch: Arch, feature_dim: int, *, slots: int, markov_dim: int) -> None:
        super().__init__(arch, feature_dim, above=True)
        self.slots = nn.Parameter(torch.randn(slots, arch.dim) * 0.02)
        self.slot_above = Linear(2 * arch.dim, arch.dim, bias=False)
        self.markov_in = Linear(2 * arch.dim, markov_dim)
        self.markov_out = Linear(markov_dim, arch.dim)
        nn.init.zeros_(self.markov_out.weight)

    def queries(self, above: Tensor) -> Tensor:
        """above (R, D, 2) token ids of the cells to come -> slot inputs (R, D, dim)."""
        return self.slots[: above.shape[1]] + self.slot_above(self.embed_above(above).flatten(-2))

    def correct(self, features: Tensor, tokens: Tensor) -> Tensor:
        """A slot's feature (R, 1, dim) for each token (R, W) that may stand before it: (R, W, dim)."""
        features = features.expand(-1, tokens.shape[1], -1)
        both = torch.cat([features, self.body.embed(tokens).to(features.dtype)], dim=-1)
        return features + self.markov_out(nn.functional.silu(self.markov_in(both)))


@dataclass(frozen=True, slots=True)
class Block:
    """A trained block drafter with the calibration of its scores."""

    net: BlockNet
    calibration: Calibration | None = Calibration()
    image_offset: int | None = None

    @torch.no_grad()
    def open(self, prompts: Sequence[Prompt], layout: Layout, first: Opening, *, guidance: float) -> BlockSession:
        return BlockSession(self, layout, first, guidance)


class BlockSession(EagleSession):
    """One pass over the slots answers every level of the tree."""

    def __init__(self, drafter: Block, layout: Layout, first: Opening, guidance: float) -> None:
        super().__init__(Eagle(drafter.net, drafter.calibration, drafter.image_offset), layout, first, guidance)
        self.block = drafter.net

    def fit(self, request: Request) -> Request:
        return replace(request, plan=request.plan.cut(self.block.slots.shape[0]))

    def expander(self, request: Request) -> Expand:
        slots = self._slots(request) if request.plan.depth else self.top

        def expand(level: Level) -> Tensor:
            feature = slots[:, level.depth : level.depth + 1]  # (R, 1, D)
            return self.logits(self.block.correct(feature, level.tokens.repeat(self.copies, 1)))

        return expand

    def _slots(self, request: Request) -> Tensor:
        """Features (R, D, dim) of the D cells after the root."""
        depth, rows = request.plan.depth, self.offset.shape[0]
        order = torch.arange(depth, device=self.offset.device)
        steps = request.steps.repeat(self.copies)[:, None] + 1 + order  # (R, D)
        x = self.block.queries(above_tokens(self.known, self.layout, steps, self.roots, self.copies))
        before = (order[:, None] >= order).expand(rows, depth, depth)
        return self.stream.branch(x, self.rotation(steps), order.expand(rows, depth), before)
