"""What a call of the pipeline returns: pictures, the seeds they came from, what they cost and what happened.

Every figure is a sum over histories; nothing here decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from underdraw.errors import ConfigError
from underdraw.history import History

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Stats:
    """What one call cost. Times are of the decoding loop, without loading and without turning codes into pixels."""

    seconds: float
    passes: int
    tokens: int
    tokens_per_pass: float
    mean_depth: float
    mean_nodes: float

    @classmethod
    def of(cls, histories: Sequence[History], seconds: float) -> Stats:
        """Sums over a batch. Images of a batch share their passes, so `passes` is the largest number of them."""
        drawn = [int((history.pass_index >= 0).sum()) for history in histories]
        own = sum(history.passes for history in histories)

        def mean(name: str) -> float:
            return sum(getattr(h, name) * h.passes for h in histories if h.passes) / max(1, own)

        return cls(
            seconds=seconds,
            passes=max(history.passes for history in histories),
            tokens=sum(drawn),
            tokens_per_pass=sum(drawn) / max(1, own),
            mean_depth=mean("mean_depth"),
            mean_nodes=mean("mean_nodes"),
        )


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """Pictures, in the order of prompts and then of images per prompt, with what happened on the way to them."""

    images: Any  # list of PIL images, array (B, H, W, 3), tensor (B, 3, H, W), or codes (B, rows, cols)
    prompts: list[str]
    seeds: list[int]
    stats: Stats
    histories: list[History]
    complete: bool  # False if a callback has interrupted it

    @property
    def history(self) -> History:
        """The record of the first image."""
        return self.histories[0]

    def heatmap(self, index: int = 0) -> Image:
        """What happened at every cell of one picture, drawn over it."""
        if not isinstance(self.images, list):
            raise ConfigError("a heat map is drawn over a picture; call the pipeline with output_type='pil'.")
        return self.histories[index].heatmap(self.images[index])
