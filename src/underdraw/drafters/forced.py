"""Drafts only the tokens that the layout forces (row ends): the drafter of plain autoregression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from underdraw.layout import Layout
from underdraw.protocols import CapturableDraft, DraftRequest, Guidance, PrefillOutput, Prompt
from underdraw.tree import DraftTree, chain, root_only


@dataclass(frozen=True, slots=True)
class Forced:
    """No weights and no guesses."""

    proposes: ClassVar[Literal["chain"]] = "chain"
    mixes_sizes: ClassVar[bool] = True

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> ForcedSession:
        return ForcedSession(layout)


@dataclass(frozen=True, slots=True)
class ForcedSession(CapturableDraft):
    """Has no state besides the layout."""

    layout: Layout

    def copy_slots(self, source: ForcedSession, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        """There is no state to copy."""

    def draft(self, request: DraftRequest) -> DraftTree:
        if request.plan.depth == 0 or self.layout.row_end is None:
            return root_only(request.root)
        tokens = torch.stack([request.root, torch.full_like(request.root, self.layout.row_end)], dim=1)
        max_depth = 1 if request.limits is None else request.limits.depth.clamp(max=1)
        return chain(tokens, self.layout.is_row_end(request.steps + 1) * max_depth)
