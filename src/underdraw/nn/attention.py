"""Attention of a few new nodes to a cache, through one mask, with a result that does not depend on the other nodes.

On a CPU the sum over keys is taken block by block of *sequence places*, with the normaliser as one more value column.
Masked keys add exact zeros, and a tree node's ancestors stand in the same order as the committed tokens would, so a
node of a large tree gets the same bits as the same token decoded alone. On a GPU it is torch's fused attention, two
plain products with a softmax between them, or a kernel of our own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from underdraw.constants import scalar
from underdraw.nn.row_invariant import padded_rows

_SPLIT_WIDTHS = (16, 32, 64, 128, 256)  # of heads, that `nn.split` has blocks for
_COLUMNS = 16  # of values that a CPU keeps at least
_NARROW = 128  # width of heads whose blocks fit every GPU
_ALONE = 132  # heads of all rows from which on torch's own attention keeps a GPU busy
Kernel = Literal["fused", "products", "split", "auto"]
"""How a GPU attends: torch's fused attention, two products with a softmax between them, `nn.split`, or what is best."""


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """A stretch of cache slots that holds all keys of one block of places; `inside` masks the others out."""

    start: int
    stop: int
    inside: Tensor | None  # (R * G, 1, stop - start) float, None when every visible slot belongs


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """What each new node may look at, as a bias that is added to scores; on a CPU with the windows of the slots."""

    bias: Tensor  # (R, 1, N, length), on a CPU (R * G, M, length) as `attend_cpu` has it
    windows: tuple[SlotBlock, ...] = ()

    @classmethod
    def of(cls, bias: Tensor, windows: tuple[SlotBlock, ...], heads: int, groups: int) -> AttentionMask:
        """From a bias (R, N, length), as it is seen on a CPU."""
        rows, count, length = bias.shape
        queries = heads // groups * count
        padded = padded_rows(queries, bias.dtype)
        bias = bias[:, None, None].expand(rows, groups, -(-padded // count), count, length)
        return cls(bias.reshape(rows * groups, -1, length)[:, :padded], windows)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """The same for `nn.split`: all committed slots, and of the nodes behind them the ancestors."""

    committed: Tensor  # (R,)
    ancestors: Tensor  # (B, N, M), of images whose copies the rows are


def seen(ancestors: Tensor, committed: Tensor, slots: Tensor, ends: Tensor, costs: Tensor) -> Tensor:
    """What N nodes see of L slots, as a bias: ancestors (B, N, M) and committed (R,) slots -> (R, N, L).

    Rows are copies of B images. `slots` are 1, 2, ..., L, `ends` True and False, and `costs` what is added to the score
    of a slot that is seen and of one that is not.
    """
    batch, count, nodes = ancestors.shape
    first, last = ends.expand(batch, count, 2).split(1, dim=-1)
    table = torch.where(torch.cat([first, ancestors, last], dim=-1), costs[0], costs[1])  # (B, N, M + 2)
    ahead = (slots - committed[:, None]).clamp(0, nodes + 1)  # (R, L) place in the table
    index = ahead.view(-1, batch, 1, len(slots)).expand(-1, -1, count, -1)
    return table.expand(len(index), -1, -1, -1).gather(3, index).flatten(0, 1)


def splits(kernel: Kernel, keys: Tensor, heads: int) -> bool:
    """True if `nn.split` attends to keys (R, G, L, D): when asked for, and where it was seen to be fastest."""
    rows, groups, _, width = keys.shape
    if kernel == "auto":
        best = heads != groups or (keys.dtype != torch.float32 and rows * groups <= _ALONE)
        return best and width in _SPLIT_WIDTHS and width <= _NARROW and triton_available(keys.device)
    return kernel == "split" and width in _SPLIT_WIDTHS


@functools.cache
def triton_available(device: torch.device) -> bool:
    """True where kernels of our own run: triton is there, and the GPU has the matrix units that they are made for."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def windows(
    committed: Tensor, depths: Tensor, spread: int, first: int, length: int, groups: int, size: int
) -> tuple[SlotBlock, ...]:
    """Windows of `size` places over `length` slots.

    Rows hold `committed` (R,) tokens, then nodes whose places are committed + depth. `depths` (R, M) are those of the
    nodes now in the slots from `committed` on. A node's slot never comes before its place and at most `spread` slots
    after it. `first` is a lower bound of `committed`, known without asking the device.
    """
    starts = range(0, length, size)
    if len(starts) == 1 or not spread:
        return tuple(SlotBlock(start, min(start + size, length), None) for start in starts)
    slot = torch.arange(length, device=depths.device)
    ahead = (slot - committed[:, None]).clamp(0, depths.shape[1] - 1)  # (R, length) node in the slot
    place = torch.where(slot < committed[:, None], slot, committed[:, None] + depths.gather(1, ahead))
    parts = []
    for start in starts:
        stop = start + size
        if stop <= first:
            parts.append(SlotBlock(start, stop, None))
            continue
        stop = min(stop + spread, length)
        inside = place[:, start:stop] // size == start // size
        parts.append(SlotBlock(start, stop, inside[:, None].float().repeat_interleave(groups, dim=0)))
    return tuple(parts)


def allocate_cache(shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Caches of keys and values, (layers, R, G, L, D), where and of which type `like` is.

    A CPU keeps the places of keys side by side in memory, so that the BLAS multiplies any number of queries alike and a
    few of them faster; and its values have one more column, of ones, that sums up to the normaliser. Narrow ones have
    yet more columns, of nothing, because a BLAS adds up few of them in another order.
    """
    layers, *places, width = shape
    if like.device.type != "cpu":
        return like.new_zeros(shape), like.new_zeros(shape)
    values = like.new_zeros(*shape[:-1], max(width + 1, _COLUMNS))
    values[..., width] = 1
    return like.new_zeros(layers, width, *places).movedim(1, -1), values


def attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: AttentionMask | TreeMask, kernel: Kernel = "fused"
) -> Tensor:
    """q (R, N, H, D) against keys and values (R, G, L, D): (R, N, H * D). For a CPU there is `attend_cpu`."""
    if isinstance(visible, TreeMask):
        from underdraw.kernels.tree_attention import tree_attention

        return tree_attention(q, keys, values, visible.committed, visible.ancestors)
    rows, count, heads, width = q.shape
    groups = keys.shape[1]
    q = q.transpose(1, 2)
    if kernel in ("fused", "auto") and heads == groups:  # torch's own is slow where heads share keys
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible.bias)
    else:
        q = q.reshape(rows, groups, heads // groups * count, width)
        out = _attend_products(q, keys, values, visible).view(rows, heads, count, width)
    return out.transpose(1, 2).reshape(rows, count, heads * width)


def _attend_products(q: Tensor, keys: Tensor, values: Tensor, visible: AttentionMask) -> Tensor:
    """q (R, G, M, D), where the M rows are the heads of a group times N nodes -> (R, G, M, D)."""
    scores = (q @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5  # (R, G, M, L)
    scores = scores.unflatten(2, (-1, visible.bias.shape[2])) + visible.bias[:, :, None]
    return scores.softmax(-1).to(values.dtype).flatten(2, 3) @ values


def attend_cpu(q: Tensor, keys: Tensor, values: Tensor, visible: AttentionMask) -> Tensor:
    """The same on a CPU: q (R, N, H, D) against keys (R * G, D, L) and values (R * G, L, D + 1 or more)."""
    rows, nodes, heads, width = q.shape
    count = rows * nodes * heads // len(keys)  # queries of a key-value head
    q = q.transpose(1, 2).reshape(-1, count, width) * scalar(width**-0.5)
    padded = visible.bias.shape[1]
    if padded > count:
        q = torch.cat([q] * -(-padded // count), dim=1)[:, :padded]
    weights = torch.baddbmm(visible.bias, q, keys)  # (R * G, M, L)
    if weights.dtype != torch.float32:
        weights = weights.float()
    weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    if weights.dtype != values.dtype:
        weights = weights.to(values.dtype)
    total = torch.bmm(weights, values) if len(visible.windows) == 1 else _sum(weights, values, visible.windows)
    if padded > count:
        total = total[:, :count]
    out = total.narrow(-1, 0, width) / total.narrow(-1, width, 1)
    return out.view(rows, heads, nodes, width).transpose(1, 2).reshape(rows, nodes, heads * width)


def _sum(weights: Tensor, values: Tensor, windows: tuple[SlotBlock, ...]) -> Tensor:
    """weights (R * G, M, L) times values, block after block."""
    total: Tensor | None = None
    for window in windows:
        part = weights.narrow(2, window.start, window.stop - window.start)
        if window.inside is not None:
            part = part * window.inside.to(part.dtype)
        block = torch.bmm(part, values.narrow(1, window.start, window.stop - window.start))
        total = block if total is None else total.add_(block)
    assert total is not None
    return total
