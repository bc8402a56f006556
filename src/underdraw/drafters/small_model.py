"""A smaller model of the same family as the drafter: same prompts, same tokens, its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.network import NetworkDraftSession, PendingTokens
from underdraw.layout import Layout
from underdraw.nn.target import DecoderSession, DecoderTarget
from underdraw.plan import MAX_EXPANDED, MAX_NODES
from underdraw.protocols import PrefillOutput, Prompt


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Any decoder that reads the target's prompts and draws the target's codes."""

    proposes: ClassVar[Literal["tree"]] = "tree"

    target: DecoderTarget
    calibration: Calibration | None = Calibration()

    @torch.no_grad()
    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> SmallModelSession:
        return SmallModelSession(self, prompts, layout, guidance)


class SmallModelSession(NetworkDraftSession):
    """The small model reads tokens alone; the target's features are nothing to it."""

    def __init__(self, drafter: SmallModel, prompts: Sequence[Prompt], layout: Layout, guidance: float) -> None:
        self.session = DecoderSession(drafter.target, prompts, layout, guidance, room=MAX_EXPANDED + MAX_NODES)
        net, cache = drafter.target.net, self.session.cache
        super().__init__(net, layout, guidance, drafter.calibration, cache, self.session.offset)
        self._root()

    @torch.no_grad()
    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if not self.session.restart(prompts):
            return False
        self._root()
        return True

    def _root(self) -> None:
        """Start with the root pending; the prompt has been read."""
        rows = self.cache.length.shape[0]
        start = torch.full((rows, 1), self.layout.start, device=self.cache.length.device)
        self.begin(PendingTokens(start, None, start, torch.ones_like(self.cache.length), (1,) * rows))

    def inputs(self, tokens: Tensor, features: Tensor | None, beside: Tensor | None) -> Tensor:
        return self.net.embed(tokens)
