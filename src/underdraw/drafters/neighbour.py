"""Guesses without weights: copy the token to the left, those above, and what followed the same token before.

Each source is a vote for one code with a weight; the votes over a thin uniform floor are the draft's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.protocols import CapturableDraft, DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.tree import DraftTree, Frontier, grow_tree


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Weights of the votes: left, above, above-right, and the code that last followed this one in this image."""

    proposes: ClassVar[Literal["tree"]] = "tree"

    left: float = 1.0
    above: float = 1.0
    above_right: float = 0.5
    bigram: float = 1.0
    floor: float = 0.5

    def __post_init__(self) -> None:
        weights = (self.left, self.above, self.above_right, self.bigram, self.floor)
        if not all(map(math.isfinite, weights)):
            raise ConfigError(f"neighbour weights {weights} must be finite numbers.")
        if min(self.left, self.above, self.above_right, self.bigram) < 0 or self.floor <= 0:
            raise ConfigError("neighbour weights must not be negative and floor must be positive.")

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> NeighbourSession:
        return NeighbourSession(self, layout, len(prompts), prefill.logits.device)


class NeighbourSession(CapturableDraft):
    """The committed tokens of B images, and for every column the one that followed it last."""

    def __init__(self, drafter: Neighbour, layout: Layout, batch: int, device: torch.device) -> None:
        self.drafter, self.layout = drafter, layout
        self.committed = torch.full((batch, layout.steps), -1, dtype=torch.int64, device=device)  # columns
        self.follows = torch.full((batch, layout.vocab_size), -1, dtype=torch.int64, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if len(prompts) != self.committed.shape[0]:
            return False
        self.committed.fill_(-1)
        self.follows.fill_(-1)
        return True

    def draft(self, request: DraftRequest) -> DraftTree:
        self.steps = request.steps
        self.committed.scatter_(1, request.steps[:, None], self.layout.vocab_indices(request.root)[:, None])

        def expand(level: Frontier) -> Tensor:
            return self._votes(self.layout.vocab_indices(level.tokens), request.steps + level.depth + 1)

        return grow_tree(
            expand, request.root, request.plan, request.noise_window,
            proposal=request.proposal, calibration=Calibration(), limits=request.limits,
        )  # fmt: skip

    def _votes(self, before: Tensor, steps: Tensor) -> Tensor:
        """Log weights (B, W, K) for the cell at `steps` (B,), given the columns (B, W) drafted before it."""
        weights, codes = self.drafter, len(self.layout.codes)
        votes = torch.full(
            (*before.shape, codes + 1), weights.floor / codes, device=before.device
        )  # last: nobody's vote
        sources = [(before, weights.left), (self.follows.gather(1, before), weights.bigram)]
        for rows, cols, weight in ((-1, 0, weights.above), (-1, 1, weights.above_right)):
            place, inside = self.layout.neighbour(steps, rows, cols)
            column = self.committed.gather(1, place.clamp(0, self.committed.shape[1] - 1)[:, None])
            sources.append((torch.where(inside[:, None], column, -1).expand_as(before), weight))
        for column, weight in sources:
            valid = (column >= 0) & (column < codes)
            votes.scatter_add_(2, torch.where(valid, column, codes)[..., None], torch.full_like(votes[..., :1], weight))
        return votes[..., :codes].log()

    def commit(self, verified: VerifiedStep) -> None:
        path = verified.accepted_path.path
        columns = self.layout.vocab_indices(verified.tree.tokens.gather(1, path))  # (B, D), the root first
        order = torch.arange(path.shape[1], device=path.device)
        accepted = (order > 0) & (order < verified.counts[:, None])
        steps = torch.where(accepted, self.steps[:, None] + order, self.steps[:, None])
        self.committed.scatter_(1, steps, torch.where(accepted, columns, columns[:, :1]))
        last = self.layout.vocab_indices(verified.accepted_path.next_token)[:, None]
        after = torch.where(order + 1 < verified.counts[:, None], torch.cat([columns[:, 1:], last], dim=1), last)
        real = order < verified.counts[:, None]
        place = torch.where(real, columns, columns[:, :1])
        # Places past the path repeat the root's own pair.
        self.follows.scatter_(1, place, torch.where(real, after, after[:, :1]))
