"""Cases of attention to a half-filled KV cache through a tree mask, compared with torch's attention in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Rows of a cache, copies of fewer images, and the tree nodes that attend to them."""

    committed: tuple[int, ...]  # slots of each row
    nodes: int
    heads: int = 4
    kv_heads: int = 4
    width: int = 16
    capacity: int = 448
    length: int = 448  # slots that the pass reads
    earlier_nodes: int = 0  # tree nodes in the cache before those that attend
    copies: int = 1

    def trees(self) -> tuple[Tensor, Tensor]:
        """Ancestors (B, N, M) of random trees, and the mask (R, N, length) of the slots that their nodes see."""
        generator = torch.Generator().manual_seed(self.nodes)
        rows, all_nodes = len(self.committed), self.earlier_nodes + self.nodes
        ancestors = torch.rand(rows // self.copies, self.nodes, all_nodes, generator=generator) < 0.5
        itself = torch.eye(all_nodes, dtype=torch.bool)[self.earlier_nodes :]
        ancestors = ancestors.tril(self.earlier_nodes) | itself
        mask = torch.zeros(rows, self.nodes, self.length, dtype=torch.bool)
        for row, start in enumerate(self.committed):
            mask[row, :, :start] = True
            mask[row, :, start : start + all_nodes] = ancestors[row % len(ancestors)]
        return ancestors, mask


CASES = (
    Case((100, 3), 1),
    Case((300, 0, 17), 8, kv_heads=2),
    Case((250,), 24, heads=8, kv_heads=2, length=320),
    Case((128, 256), 16, width=32),
    Case((128, 250, 60, 5), 12, earlier_nodes=20, copies=2),
    Case((300, 290), 6, width=20, copies=2),
)


def check_attention(
    case: Case, attention: Attention, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Compare with torch's attention; slots past the used ones are NaN and must not be read."""
    generator = torch.Generator().manual_seed(case.nodes)
    rows = len(case.committed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal(rows, case.nodes, case.heads + case.kv_heads, case.width)[:, :, : case.heads]
    keys, values = (normal(rows, case.kv_heads, case.capacity, case.width) for _ in range(2))
    ancestors, mask = (part.to(device) for part in case.trees())
    share = case.heads // case.kv_heads
    repeated = [cache[:, :, : case.length].float().repeat_interleave(share, 1) for cache in (keys, values)]
    expected = functional.scaled_dot_product_attention(q.float().transpose(1, 2), *repeated, attn_mask=mask[:, None])
    for row, start in enumerate(case.committed):
        keys[row, :, start + case.earlier_nodes + case.nodes :] = torch.nan
        values[row, :, start + case.earlier_nodes + case.nodes :] = torch.nan
    committed = torch.tensor(case.committed, device=device)
    depths = ancestors.sum(-1) - 1
    out = attention(q, keys[:, :, : case.length], values[:, :, : case.length], committed, ancestors, depths)
    error = (out.float() - expected.transpose(1, 2).flatten(2)).abs().max()
    assert error < tolerance, f"{case}: {error}"


def attention_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random queries, caches, committed slots, ancestors and depths of a case, to compare kernels bit for bit."""
    generator = torch.Generator().manual_seed(case.nodes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows, ancestors = len(case.committed), case.trees()[0].to(device)
    caches = [normal(rows, case.kv_heads, case.capacity, case.width) for _ in range(2)]
    committed = torch.tensor(case.committed, device=device)
    return normal(rows, case.nodes, case.heads, case.width), *caches, committed, ancestors, ancestors.sum(2) - 1
