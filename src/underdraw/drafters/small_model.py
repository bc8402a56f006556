"""A smaller model of the same family as the drafter: same prompts and tokens, its own KV cache."""

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
from underdraw.nn.transformer import Transformer
from underdraw.plan import MAX_EXPANDED, MAX_NODES
from underdraw.protocols import Guidance, PrefillOutput, Prompt


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Any decoder with the target's prompts and codes."""

    proposes: ClassVar[Literal["tree"]] = "tree"

    target: DecoderTarget
    calibration: Calibration | None = Calibration()

    @property
    def net(self) -> Transformer:
        return self.target.net

    @torch.no_grad()
    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> SmallModelSession:
        return SmallModelSession(self, prompts, layout, guidance)


class SmallModelSession(NetworkDraftSession):
    """Reads tokens only, not the target's features."""

    def __init__(self, drafter: SmallModel, prompts: Sequence[Prompt], layout: Layout, guidance: Guidance) -> None:
        self.session = DecoderSession(drafter.target, prompts, layout, guidance, tree_slots=MAX_EXPANDED + MAX_NODES)
        net, decoder = drafter.target.net, self.session.decoder
        super().__init__(net, layout, guidance, drafter.calibration, decoder, self.session.offset)
        self._reset_to_root()

    @torch.no_grad()
    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if not self.session.restart(prompts):
            return False
        self._reset_to_root()
        return True

    def _reset_to_root(self) -> None:
        """Make the root pending; the KV cache holds the prompt."""
        rows = self.cache.length.shape[0]
        start = torch.full((rows, 1), self.layout.start, device=self.cache.length.device)
        self.reset(PendingTokens(start, None, start, torch.ones_like(self.cache.length), (1,) * rows))

    def embed_inputs(self, tokens: Tensor, features: Tensor | None, position_inputs: Tensor | None) -> Tensor:
        return self.net.embed(tokens)
