"""Rotary positions: one axis (the sequence) or several (sequence, row, column), with either pairing of dimensions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.layout import Layout

CosSin = tuple[Tensor, Tensor]
"""What `apply_rope` multiplies heads with: cosines and signed sines, (R, N, 1, D) each."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How a head's rotation angles are shared out between the place in the sequence, the row and the column.

    `axes` counts angles, and their sum is half the head's width. `pairing` says which two dimensions an angle turns:
    (i, i + half) or (2i, 2i + 1). `prefix` says what becomes of the prompt: turned like everything else, or zeroed,
    which takes its keys and queries out of the scores (LlamaGen).
    """

    axes: tuple[int, int, int]
    theta: float = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    prefix: Literal["turn", "zero"] = "turn"

    @classmethod
    def one_axis(cls, head_dim: int, theta: float = 10000.0, pairing: Literal["half", "interleaved"] = "half") -> Rope:
        return cls((head_dim // 2, 0, 0), theta, pairing)

    def angles(self, places: Tensor) -> Tensor:
        """(..., 3) float places on the three axes -> (..., sum(axes)) angles, float32."""
        axes, rates = _rates(self, places.device)
        return places[..., axes] * rates

    def prompt(self, count: int, device: torch.device) -> Tensor:
        """Rotation of prompt places 0..count-1: (count, 2, half), cosine and sine."""
        place = torch.arange(count, device=device, dtype=torch.float32)
        angles = self.angles(torch.stack([place, torch.zeros_like(place), torch.zeros_like(place)], -1))
        table = torch.stack([angles.cos(), angles.sin()], dim=-2)
        return torch.zeros_like(table) if self.prefix == "zero" else table

    def raster(self, layout: Layout, steps: Tensor, offset: Tensor) -> Tensor:
        """Rotation of image tokens: (R, N) steps, (R,) sequence place of step 0 -> (R, N, 2, half)."""
        row, col = layout.rows_cols(steps)
        places = torch.stack([steps + offset[:, None], row.clamp(min=0), torch.where(row < 0, 0, col)], dim=-1)
        angles = self.angles(places.float())
        return torch.stack([angles.cos(), angles.sin()], dim=-2)

    def cos_sin(self, rotation: Tensor, dtype: torch.dtype) -> Tensor:
        """What heads are multiplied with: rotation (..., 2, D / 2) -> (..., 2, D), cosines and signed sines."""
        cos, sin = rotation.to(dtype).unbind(-2)  # (..., D / 2)
        both = torch.stack([cos, -sin], dim=-2), torch.stack([cos, sin], dim=-2)
        return torch.cat(both, dim=-1) if self.pairing == "half" else torch.stack(both, dim=-1).flatten(-2)

    def check(self, head_dim: int) -> None:
        if 2 * sum(self.axes) != head_dim:
            raise ConfigError(
                f"rope axes {self.axes} hold {sum(self.axes)} angles; heads of width {head_dim} need {head_dim // 2}."
            )


class RopeTable:
    """The factors of all steps of R rows, looked up instead of computed; in a tensor that stays where it is."""

    def __init__(self, rope: Rope, layout: Layout, offset: Tensor, dtype: torch.dtype) -> None:
        self.rope, self.layout, self.offset, self.dtype = rope, layout, offset, dtype
        steps = torch.arange(layout.steps, device=offset.device)
        self.steps = steps.expand(len(offset), -1)
        self.prefill = (torch.arange(len(offset), device=offset.device) * layout.steps)[:, None]
        self.table = torch.empty(0)

    def fill(self) -> None:
        """Follow what `offset` (R,) has become."""
        rotation = self.rope.raster(self.layout, self.steps, self.offset).flatten(0, 1)
        found = self.rope.cos_sin(rotation, self.dtype)  # (R * S, 2, D)
        self.table = self.table.copy_(found) if len(self.table) else found

    def __call__(self, steps: Tensor) -> Tensor:
        """(B, N) steps of images whose copies the rows are, those past the last one as the last -> (R, N, 2, D)."""
        place = steps.clamp(0, self.layout.steps - 1) + self.prefill.view(-1, len(steps), 1)
        return self.table.index_select(0, place.flatten()).view(-1, steps.shape[1], *self.table.shape[1:])


@functools.cache  # never forgotten, since captured passes read these tensors
def _rates(rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """The axis of each angle, and how fast it turns: (sum(axes),) each."""
    counts = [torch.arange(count, device=device, dtype=torch.float32) / max(count, 1) for count in rope.axes]
    many = torch.tensor(rope.axes, device=device)
    axes = torch.arange(3, device=device).repeat_interleave(many, output_size=sum(rope.axes))
    return axes, rope.theta ** -torch.cat(counts)


def split_cos_sin(cos_sin: Tensor) -> CosSin:
    """Factors (R, N, 2, D) as `apply_rope` takes them."""
    cos, sin = cos_sin[..., None, :].unbind(2)
    return cos, sin


def apply_rope(x: Tensor, turn: CosSin, pairing: str) -> Tensor:
    """Turn heads x (R, N, H, D)."""
    cos, sin = turn
    half = x.shape[-1] // 2
    other = x.roll(half, -1) if pairing == "half" else x.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
    return x * cos + other * sin
