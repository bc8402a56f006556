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
    """Rows with a few committed slots each, nodes, heads and key-value heads, slots of the cache and of the pass."""

    committed: tuple[int, ...]
    nodes: int
    heads: int = 4
    groups: int = 4
    width: int = 16
    capacity: int = 448
    length: int = 448


CASES = (
    Case((100, 3), 1),
    Case((300, 0, 17), 8, groups=2),
    Case((250,), 24, heads=8, groups=2, length=320),
    Case((128, 256), 16, width=32),
)


def check(case: Case, attention: Attention, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Compare over a random tree; what lies past the used slots is poison."""
    generator = torch.Generator().manual_seed(case.nodes)
    rows = len(case.committed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal(rows, case.nodes, case.heads + case.groups, case.width)[:, :, : case.heads]
    keys, values = (normal(rows, case.groups, case.capacity, case.width) for _ in range(2))
    used = torch.tensor(case.committed, device=device) + case.nodes
    mask = torch.zeros(rows, 1, case.nodes, case.length, dtype=torch.bool, device=device)
    own = torch.rand(rows, case.nodes, case.nodes, generator=generator) < 0.5
    own = (own.tril() | torch.eye(case.nodes, dtype=torch.bool)).to(device)
    for row, start in enumerate(case.committed):
        mask[row, 0, :, :start] = True
        mask[row, 0, :, start : start + case.nodes] = own[row]
    bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, -torch.inf)
    share = case.heads // case.groups
    whole = [cache[:, :, : case.length].float().repeat_interleave(share, 1) for cache in (keys, values)]
    expected = functional.scaled_dot_product_attention(q.float().transpose(1, 2), *whole, attn_mask=bias.float())
    for row, start in enumerate(case.committed):
        keys[row, :, start + case.nodes :] = torch.nan
        values[row, :, start + case.nodes :] = torch.nan
    found = attention(q, keys[:, :, : case.length], values[:, :, : case.length], bias, used)
    error = (found.float() - expected.transpose(1, 2).flatten(2)).abs().max()
    assert error < tolerance, f"{case}: {error}"
