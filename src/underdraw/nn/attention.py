"""Attention of a few new nodes to a cache, through one mask, with a result that does not depend on the other nodes.

On a CPU the sum over keys is taken block by block of *sequence places*, with the normaliser as one more value column.
Masked keys add exact zeros, and a tree node's ancestors stand in the same order as the committed tokens would, so a
node of a large tree gets the same bits as the same token decoded alone. On a GPU it is torch's fused attention, or two
plain products with a softmax between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # places a block: with up to 128 tree nodes a sum has 384 terms, the most that the BLAS adds in plain order
_FEWEST = 4  # queries below which the BLAS takes another path
Kernel = Literal["fused", "products"]
"""How a GPU attends; which one is faster depends on the number of queries."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of cache slots that holds all keys of one block of places; `inside` masks the others out."""

    start: int
    stop: int
    inside: Tensor | None  # (R, 1, 1, stop - start) float, None when every visible slot belongs


@dataclass(frozen=True, slots=True)
class Visible:
    """What each new node may look at: `mask` over the first `length` cache slots, and their windows.

    On a GPU the mask is a bias, which is added to scores, and there are no windows.
    """

    mask: Tensor  # (R, 1, N, length) bool, or the keys' type
    windows: tuple[Window, ...]

    @property
    def length(self) -> int:
        return self.mask.shape[-1]


def windows(committed: Tensor, depths: Tensor, spread: int, first: int, length: int) -> tuple[Window, ...]:
    """Windows over `length` slots: rows hold `committed` (R,) tokens, then nodes whose places are committed + depth.

    `depths` (R, M) are those of the nodes now in the slots from `committed` on. A node's slot never comes before its
    place and at most `spread` slots after it. `first` is a lower bound of `committed`, known without asking the device.
    """
    count = depths.shape[1]
    if length <= BLOCK:
        return (Window(0, length, None),)
    slot = torch.arange(length, device=depths.device)
    ahead = (slot - committed[:, None]).clamp(0, count - 1)  # (R, length) node in the slot
    place = torch.where(slot < committed[:, None], slot, committed[:, None] + depths.gather(1, ahead))
    parts = []
    for start in range(0, length, BLOCK):
        stop = start + BLOCK
        if stop <= first:
            parts.append(Window(start, stop, None))
            continue
        stop = min(stop + spread, length)
        inside = place[:, start:stop] // BLOCK == start // BLOCK
        parts.append(Window(start, stop, inside[:, None, None].float()))
    return tuple(parts)


def values_like(keys: Tensor) -> Tensor:
    """An empty value cache for a key cache; on a CPU with one more column, of ones, that sums up to the normaliser."""
    if keys.device.type != "cpu":
        return torch.zeros_like(keys)
    return torch.cat([torch.zeros_like(keys), torch.ones_like(keys[..., :1])], dim=-1)


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Visible, kernel: Kernel = "fused") -> Tensor:
    """q (R, N, H, D) against cached keys (R, G, L, D) and values of `values_like`: (R, N, H * D). G divides H."""
    rows, count, heads, width = q.shape
    groups, length = keys.shape[1], visible.length
    keys, values = keys[:, :, :length], values[:, :, :length]
    q = q.transpose(1, 2)
    if q.device.type != "cpu" and kernel == "fused" and heads == groups:  # it is slow where heads share keys
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible.mask)
        return out.transpose(1, 2).reshape(rows, count, heads * width)
    q = q.reshape(rows, groups, heads // groups, count, width).flatten(2, 3)
    rule = _attend_rows if q.device.type == "cpu" else _attend_products
    out = rule(q, keys, values, visible, heads // groups).view(rows, heads, count, width)
    return out.transpose(1, 2).reshape(rows, count, heads * width)


def _attend_products(q: Tensor, keys: Tensor, values: Tensor, visible: Visible, share: int) -> Tensor:
    """As `_attend_rows`, for a GPU: visible.mask is a bias (R, 1, N, L)."""
    scores = (q @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5  # (R, G, M, L)
    weights = (scores + visible.mask.repeat(1, 1, share, 1)).softmax(-1)
    return weights.to(values.dtype) @ values


def _attend_rows(q: Tensor, keys: Tensor, values: Tensor, visible: Visible, share: int) -> Tensor:
    """q (R, G, M, D), where the M rows are `share` heads times N nodes -> (R, G, M, D)."""
    count, width = q.shape[2:]
    if count < _FEWEST:
        q = torch.cat([q, q[:, :, :1].expand(-1, -1, _FEWEST - count, -1)], dim=2)
    scores = (q @ keys.transpose(-1, -2))[:, :, :count] * width**-0.5  # (R, G, M, L)
    hidden = ~visible.mask  # (R, 1, N, L)
    if share > 1:
        hidden = hidden.repeat(1, 1, share, 1)
    scores = scores.masked_fill_(hidden, -torch.inf).float()
    weights = (scores - scores.amax(-1, keepdim=True)).exp_().to(values.dtype)
    if count < _FEWEST:
        weights = torch.cat([weights, weights[:, :, :1].expand(-1, -1, _FEWEST - count, -1)], dim=2)
    total: Tensor | None = None
    for window in visible.windows:
        part = weights[..., window.start : window.stop]
        if window.inside is not None:
            part = part * window.inside.to(part.dtype)
        block = part @ values[:, :, window.start : window.stop]
        total = block if total is None else total.add_(block)
    assert total is not None
    total = total[:, :, :count]
    return total[..., :-1] / total[..., -1:]
