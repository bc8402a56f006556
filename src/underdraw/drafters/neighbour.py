"""Drafts without weights from the tokens to the left and above, and from what followed the same token before.

Each source votes for one code with its weight; the votes plus a small uniform floor are the draft distribution.
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
from underdraw.protocols import CapturableDraft, DraftRequest, Guidance, PrefillOutput, Prompt, VerifiedStep
from underdraw.tree import DraftTree, Frontier, grow_tree


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Weights of the votes: left, above, above-right, and the code that last followed the previous one (`bigram`)."""

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
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> NeighbourSession:
        return NeighbourSession(self, layout, len(prompts), prefill.logits.device)


class NeighbourSession(CapturableDraft):
    """The committed tokens of B images, and for every token the one that last followed it, as vocabulary indices."""

    def __init__(self, drafter: Neighbour, layout: Layout, batch: int, device: torch.device) -> None:
        self.drafter, self.layout = drafter, layout
        self.committed = torch.full((batch, layout.steps), -1, dtype=torch.int64, device=device)
        self.successors = torch.full((batch, layout.vocab_size), -1, dtype=torch.int64, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int64, device=device)  # (B,) of the last root

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if len(prompts) != self.committed.shape[0]:
            return False
        self.committed.fill_(-1)
        self.successors.fill_(-1)
        return True

    def copy_slots(self, source: NeighbourSession, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        self.committed[list(slots)] = source.committed[list(source_slots)]
        self.successors[list(slots)] = source.successors[list(source_slots)]

    def draft(self, request: DraftRequest) -> DraftTree:
        self.steps = request.steps
        self.committed.scatter_(1, request.steps[:, None], self.layout.vocab_indices(request.root)[:, None])

        def expand(level: Frontier) -> Tensor:
            return self._logits(self.layout.vocab_indices(level.tokens), request.steps + level.depth + 1)

        return grow_tree(
            expand,
            request.root,
            request.plan,
            request.noise_window,
            proposal=request.proposal,
            calibration=Calibration(),
            limits=request.limits,
        )

    def _logits(self, previous: Tensor, steps: Tensor) -> Tensor:
        """Log votes (B, W, K) for the cell at `steps` (B,) after the tokens `previous` (B, W)."""
        weights, codes = self.drafter, len(self.layout.codes)
        # The last column takes the votes of sources that have no code.
        votes = torch.full((*previous.shape, codes + 1), weights.floor / codes, device=previous.device)
        sources = [(previous, weights.left), (self.successors.gather(1, previous), weights.bigram)]
        for rows, cols, weight in ((-1, 0, weights.above), (-1, 1, weights.above_right)):
            step, is_inside = self.layout.neighbour(steps, rows, cols)
            token = self.committed.gather(1, step.clamp(0, self.committed.shape[1] - 1)[:, None])
            sources.append((torch.where(is_inside[:, None], token, -1).expand_as(previous), weight))
        for token, weight in sources:
            is_code = (token >= 0) & (token < codes)
            votes.scatter_add_(
                2, torch.where(is_code, token, codes)[..., None], torch.full_like(votes[..., :1], weight)
            )
        return votes[..., :codes].log()

    def commit(self, verified: VerifiedStep) -> None:
        path = verified.accepted_path.path
        tokens = self.layout.vocab_indices(verified.tree.tokens.gather(1, path))  # (B, D), the root first
        index = torch.arange(path.shape[1], device=path.device)
        is_accepted = (index > 0) & (index < verified.counts[:, None])
        # Entries past the accepted ones write the root, and below its successor, once more.
        steps = torch.where(is_accepted, self.steps[:, None] + index, self.steps[:, None])
        self.committed.scatter_(1, steps, torch.where(is_accepted, tokens, tokens[:, :1]))
        last = self.layout.vocab_indices(verified.accepted_path.next_token)[:, None]
        after = torch.where(index + 1 < verified.counts[:, None], torch.cat([tokens[:, 1:], last], dim=1), last)
        is_committed = index < verified.counts[:, None]
        before = torch.where(is_committed, tokens, tokens[:, :1])
        self.successors.scatter_(1, before, torch.where(is_committed, after, after[:, :1]))
