# ruff: noqa: N803
"""The largest of a few thousand numbers on a GPU: one short kernel where torch sorts in several. Needs triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_SIGN, _REST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _keep(x, out, columns, k, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row with -inf in the place of what is below its k-th largest number.

    The bits of that number are found one by one, by counting what is at least as large.
    """
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    value = tl.load(x + row * columns + c, mask=c < columns, other=float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _REST, bits)  # whole numbers in the order of the floats
    found = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, _SIGN)
    for place in tl.static_range(31):
        tried = found + (1 << (30 - place))
        found = tl.where(tl.sum((key >= tried).to(tl.int32), 0) >= k, tried, found)
    found = tl.where(found < 0, found ^ _REST, found)
    kept = tl.where(value < found.to(tl.float32, bitcast=True), float("-inf"), value)
    tl.store(out + row * columns + c, kept, mask=c < columns)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _top(x, values, places, columns, C: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The K largest numbers of a row and where they stand, one after the other; of equals the first."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    left = tl.load(x + row * columns + c, mask=c < columns, other=float("-inf"))
    for rank in tl.static_range(K):
        best, place = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + row * K + rank, best)
        tl.store(places + row * K + rank, place.to(tl.int64))
        left = tl.where(c == place, float("-inf"), left)


def _warps(columns: int) -> int:
    return min(max(triton.next_power_of_2(columns) // 1024, 4), 32)


def topk_filter(x: Tensor, k: int) -> Tensor:
    """(..., K) float32, with everything below the k-th largest number of a row at -inf."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    size = triton.next_power_of_2(x.shape[-1])
    with torch.cuda.device_of(x):
        _keep[(len(rows),)](rows, out, x.shape[-1], k, C=size, num_warps=_warps(size))
    return out.view(x.shape)


def top(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(..., K) float32 -> values and places (..., count); places of -inf may repeat."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values = torch.empty(len(rows), count, dtype=x.dtype, device=x.device)
    places = torch.empty(len(rows), count, dtype=torch.int64, device=x.device)
    size = triton.next_power_of_2(x.shape[-1])
    with torch.cuda.device_of(x):
        _top[(len(rows),)](rows, values, places, x.shape[-1], C=size, K=count, num_warps=_warps(size))
    return values.view(*x.shape[:-1], count), places.view(*x.shape[:-1], count)
