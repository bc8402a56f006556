"""Attention to a half-filled cache through a mask of trees, whoever does it: torch's own in float32 is the measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Rows with a few committed slots each, nodes, heads and key-value heads, slots of the cache and of the pass.

    `older` nodes stand before those that attend; rows are copies of fewer images.
    """

    committed: tuple[int, ...]
    nodes: int
    heads: int = 4
    groups: int = 4
    width: int = 16
    capacity: int = 448
    length: int = 448
    older: int = 0
    copies: int = 1

    def trees(self) -> tuple[Tensor, Tensor]:
        """Ancestors (B, N, M) of random trees, and what their nodes see of all slots (R, N, length)."""
        generator = torch.Generator().manual_seed(self.nodes)
        rows, every = len(self.committed), self.older + self.nodes
        ancestors = torch.rand(rows // self.copies, self.nodes, every, generator=generator) < 0.5
        ancestors = ancestors.tril(self.older) | torch.eye(every, dtype=torch.bool)[self.older :]
        mask = torch.zeros(rows, self.nodes, self.length, dtype=torch.bool)
        for row, start in enumerate(self.committed):
            mask[row, :, :start] = True
            mask[row, :, start : start + every] = ancestors[row % len(ancestors)]
        return ancestors, mask


CASES = (
    Case((100, 3), 1),
    Case((300, 0, 17), 8, groups=2),
    Case((250,), 24, heads=8, groups=2, length=320),
    Case((128, 256), 16, width=32),
    Case((128, 250, 60, 5), 12, older=20, copies=2),
)


def check(case: Case, attention: Attention, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Compare over a random tree; what lies past the used slots is poison."""
    generator = torch.Generator().manual_seed(case.nodes)
    rows = len(case.committed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal(rows, case.nodes, case.heads + case.groups, case.width)[:, :, : case.heads]
    keys, values = (normal(rows, case.groups, case.capacity, case.width) for _ in range(2))
    ancestors, mask = (part.to(device) for part in case.trees())
    share = case.heads // case.groups
    whole = [cache[:, :, : case.length].float().repeat_interleave(share, 1) for cache in (keys, values)]
    expected = functional.scaled_dot_product_attention(q.float().transpose(1, 2), *whole, attn_mask=mask[:, None])
    for row, start in enumerate(case.committed):
        keys[row, :, start + case.older + case.nodes :] = torch.nan
        values[row, :, start + case.older + case.nodes :] = torch.nan
    committed = torch.tensor(case.committed, device=device)
    found = attention(q, keys[:, :, : case.length], values[:, :, : case.length], committed, ancestors)
    error = (found.float() - expected.transpose(1, 2).flatten(2)).abs().max()
    assert error < tolerance, f"{case}: {error}"
