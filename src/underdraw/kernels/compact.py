# ruff: noqa: N803
"""Moves the accepted nodes of draft trees together in a KV cache. Needs Triton.

Indexing in torch copies as many slots as a path can have, twice, for every layer: at 7B a path of 64 nodes is 130 MB.
Most accepted nodes lie where they belong already: chains and trunks are in order. This kernel moves the others.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _compact_kernel(  # type: ignore[no-untyped-def]
    keys, values, path, counts, lengths, rows, steps, k_layer, k_row, k_head, path_row,
    WIDTH: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Move the nodes of one row, head and layer: node path[i] to slot i, in ascending order.

    Nodes of a path never move up, and path[i] >= i, so no slot is overwritten before it is read.
    """
    row, head, layer = tl.program_id(0) % rows, tl.program_id(1), tl.program_id(0) // rows
    count = tl.minimum(tl.load(counts + row).to(tl.int32), steps)
    step, d = tl.arange(0, STEPS), tl.arange(0, D)
    node = tl.load(path + row * path_row + step, mask=step < count, other=0).to(tl.int32)
    first = tl.min(tl.where((step < count) & (node != step), step, STEPS), 0)
    begin = layer.to(tl.int64) * k_layer + row.to(tl.int64) * k_row + head.to(tl.int64) * k_head
    begin += tl.load(lengths + row) * WIDTH
    for i in range(first, count):
        source = begin + tl.load(path + row * path_row + i) * WIDTH + d
        target = begin + i * WIDTH + d
        key = tl.load(keys + source, mask=d < WIDTH)
        value = tl.load(values + source, mask=d < WIDTH)
        tl.store(keys + target, key, mask=d < WIDTH)
        tl.store(values + target, value, mask=d < WIDTH)


def compact(keys: Tensor, values: Tensor, path: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """Move nodes `path` (R, D) behind the `lengths` (R,) committed tokens of each row together, `counts` (R,) of them.

    keys and values (layers, R, heads, slots, width), of equal strides, are changed in place.
    """
    layers, rows, heads, _, width = keys.shape
    assert keys.stride() == values.stride() and keys.stride()[3:] == (width, 1), "slots are contiguous"
    path = path.contiguous()
    with torch.cuda.device_of(keys):
        _compact_kernel[(layers * rows, heads)](
            keys, values, path, counts, lengths, rows, path.shape[1], *keys.stride()[:3], path.stride(0),
            WIDTH=width, D=triton.next_power_of_2(width), STEPS=triton.next_power_of_2(path.shape[1]), num_warps=1,
        )  # fmt: skip
