"""Rotary position embeddings (RoPE) over one axis (the sequence) or three (sequence or time, row, column)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.layout import Layout

CosSin = tuple[Tensor, Tensor]
"""Cosines and signed sines that `apply_rope` multiplies heads with, (R, N, 1, D) each."""


@dataclass(frozen=True, slots=True)
class Rope:
    """How a head's rotation angles are divided between position in the sequence, row and column.

    `axes` counts angles, and their sum is half the head's width. `pairing` says which two dimensions an angle rotates:
    (i, i + half) or (2i, 2i + 1). Without `rotate_prompt` the prompt's cosines and sines are zero, which takes its keys
    and queries out of the scores (LlamaGen). With `mrope` (GLM-Image) rows and columns count on from the position of
    their grid, prompt tokens have the same position on all axes, and the axes share one sequence of frequencies.
    """

    axes: tuple[int, int, int]
    theta: float = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    rotate_prompt: bool = True
    mrope: bool = False
    unrotated: int = 0  # angles that are always zero, after those of the axes: dimensions without a position

    @classmethod
    def one_axis(cls, head_dim: int, theta: float = 10000.0, pairing: Literal["half", "interleaved"] = "half") -> Rope:
        """The usual RoPE over the position in the sequence."""
        return cls((head_dim // 2, 0, 0), theta, pairing)

    def angles(self, positions: Tensor) -> Tensor:
        """(..., 3) float positions on the three axes -> (..., D / 2) float32 angles."""
        axes, frequencies = _axes_and_frequencies(self, positions.device)
        return positions[..., axes] * frequencies

    def prompt_rotation(self, count: int, device: torch.device) -> Tensor:
        """Cosines and sines of prompt positions 0..count-1: (count, 2, D / 2)."""
        position = torch.arange(count, device=device, dtype=torch.float32)
        grid = position if self.mrope else torch.zeros_like(position)
        angles = self.angles(torch.stack([position, grid, grid], -1))
        table = torch.stack([angles.cos(), angles.sin()], dim=-2)
        return table if self.rotate_prompt else torch.zeros_like(table)

    def image_rotation(self, layout: Layout, steps: Tensor, offset: Tensor) -> Tensor:
        """Cosines and sines of image tokens: steps (R, N), sequence position of step 0 (R,) -> (R, N, 2, D / 2)."""
        row, col = layout.rows_cols(steps)
        row, col = row.clamp(min=0), torch.where(row < 0, 0, col)
        if self.mrope:
            origin = layout.grid_origin(steps) + offset[:, None]
            positions = torch.stack([origin, origin + row, origin + col], dim=-1)
        else:
            positions = torch.stack([steps + offset[:, None], row, col], dim=-1)
        angles = self.angles(positions.float())
        return torch.stack([angles.cos(), angles.sin()], dim=-2)

    def cos_sin(self, rotation: Tensor, dtype: torch.dtype) -> Tensor:
        """Rotation (..., 2, D / 2) spread over a head's dimensions: cosines and signed sines (..., 2, D)."""
        cos, sin = rotation.to(dtype).unbind(-2)  # (..., D / 2)
        both = torch.stack([cos, -sin], dim=-2), torch.stack([cos, sin], dim=-2)
        return torch.cat(both, dim=-1) if self.pairing == "half" else torch.stack(both, dim=-1).flatten(-2)

    def check(self, head_dim: int) -> None:
        angles = sum(self.axes) + self.unrotated
        if 2 * angles != head_dim:
            raise ConfigError(
                f"rope axes {self.axes} hold {angles} angles; heads of width {head_dim} need {head_dim // 2}."
            )


class RopeTable:
    """Precomputed cos_sin of every step of R rows, at a fixed address so that CUDA graphs can read it."""

    def __init__(self, rope: Rope, layout: Layout, offset: Tensor, dtype: torch.dtype) -> None:
        self.rope, self.layout, self.offset, self.dtype = rope, layout, offset, dtype
        steps = torch.arange(layout.steps, device=offset.device)
        self.steps = steps.expand(len(offset), -1)
        self.row_starts = (torch.arange(len(offset), device=offset.device) * layout.steps)[:, None]
        self.table = torch.empty(0)

    def update(self) -> None:
        """Recompute the table for the current `offset` (R,), the sequence position of step 0."""
        rotation = self.rope.image_rotation(self.layout, self.steps, self.offset).flatten(0, 1)
        cos_sin = self.rope.cos_sin(rotation, self.dtype)  # (R * S, 2, D)
        self.table = self.table.copy_(cos_sin) if len(self.table) else cos_sin

    def copy_rows(self, source: RopeTable, source_rows: Sequence[int], rows: Sequence[int]) -> None:
        """Overwrite `offset` and table of `rows` by those of `source_rows` of another table of any number of steps."""
        index, source_index = (torch.tensor(list(part), device=self.offset.device) for part in (rows, source_rows))
        self.offset[index] = source.offset[source_index]
        table, source_table = (part.table.unflatten(0, (-1, part.layout.steps)) for part in (self, source))
        count = min(table.shape[1], source_table.shape[1])
        table[index, :count] = source_table[source_index, :count]

    def __call__(self, steps: Tensor) -> Tensor:
        """cos_sin (R, N, 2, D) at steps (B, N), clamped to the last step; rows are copies of B images."""
        index = steps.clamp(0, self.layout.steps - 1) + self.row_starts.view(-1, len(steps), 1)
        return self.table.index_select(0, index.flatten()).view(-1, steps.shape[1], *self.table.shape[1:])


@functools.cache  # kept forever: CUDA graphs read these tensors
def _axes_and_frequencies(rope: Rope, device: torch.device) -> tuple[Tensor, Tensor]:
    """The axis and the frequency of each angle: (D / 2,) each."""
    counts = (sum(rope.axes),) if rope.mrope else rope.axes
    exponents = [torch.arange(count, device=device, dtype=torch.float32) / max(count, 1) for count in counts]
    frequencies = torch.nn.functional.pad(rope.theta ** -torch.cat(exponents), (0, rope.unrotated))
    repeats = torch.tensor((rope.axes[0], rope.axes[1], rope.axes[2] + rope.unrotated), device=device)
    axes = torch.arange(3, device=device).repeat_interleave(repeats, output_size=len(frequencies))
    return axes, frequencies


def split_cos_sin(cos_sin: Tensor) -> CosSin:
    """cos_sin (R, N, 2, D) as `apply_rope` takes it."""
    cos, sin = cos_sin[..., None, :].unbind(2)
    return cos, sin


def apply_rope(x: Tensor, cos_sin: CosSin, pairing: str) -> Tensor:
    """Rotate heads x (R, N, H, D)."""
    cos, sin = cos_sin
    half = x.shape[-1] // 2
    partner = x.roll(half, -1) if pairing == "half" else x.unflatten(-1, (half, 2)).flip(-1).flatten(-2)
    return x * cos + partner * sin
