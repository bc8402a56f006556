"""A smaller model of the same family as the drafter: same prompts, same tokens, its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.level import LevelSession, Pending
from underdraw.layout import Layout
from underdraw.nn.session import DecoderSession, DecoderTarget
from underdraw.plan import MAX_EXPANDED, MAX_NODES
from underdraw.protocols import Opening, Prompt


@dataclass(frozen=True, slots=True)
class Model:
    """Any decoder that reads the target's prompts and draws the target's codes."""

    target: DecoderTarget
    calibration: Calibration | None = Calibration()

    @torch.no_grad()
    def open(self, prompts: Sequence[Prompt], layout: Layout, first: Opening, *, guidance: float) -> ModelSession:
        return ModelSession(self, prompts, layout, guidance)


class ModelSession(LevelSession):
    """The small model reads tokens alone; the target's features are nothing to it."""

    def __init__(self, drafter: Model, prompts: Sequence[Prompt], layout: Layout, guidance: float) -> None:
        self.session = DecoderSession(drafter.target, prompts, layout, guidance, room=MAX_EXPANDED + MAX_NODES)
        net, stream = drafter.target.net, self.session.stream
        super().__init__(net, layout, guidance, drafter.calibration, stream, self.session.offset)
        self._root()

    @torch.no_grad()
    def again(self, prompts: Sequence[Prompt], first: Opening) -> bool:
        if not self.session.again(prompts):
            return False
        self._root()
        return True

    def _root(self) -> None:
        """Start with the root pending; the prompt has been read."""
        rows = self.stream.length.shape[0]
        start = torch.full((rows, 1), self.layout.start, device=self.stream.length.device)
        self.begin(Pending(start, None, start, torch.ones_like(self.stream.length), (1,) * rows))

    def inputs(self, tokens: Tensor, features: Tensor | None, beside: Tensor | None) -> Tensor:
        return self.net.embed(tokens)
