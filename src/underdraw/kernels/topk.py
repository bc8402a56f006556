# ruff: noqa: N803
"""Top-k over a few thousand logits in one short Triton kernel, where torch launches several sorts."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from underdraw.constants import constant

_SIGN_BIT, _VALUE_BITS = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _topk_filter_kernel(x, out, ks, columns, rows_per_k, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a row with -inf instead of every value below its k-th largest.

    Radix select: the bits of the k-th largest value are decided from the highest to the lowest, by counting how many
    values are at least as large as the candidate.
    """
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    k = tl.load(ks + row // rows_per_k)
    value = tl.load(x + row * columns + c, mask=c < columns, other=float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ _VALUE_BITS, bits)  # integers that sort like the floats
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= k, 0, _SIGN_BIT)
    for bit in tl.static_range(31):
        candidate = threshold + (1 << (30 - bit))
        threshold = tl.where(tl.sum((key >= candidate).to(tl.int32), 0) >= k, candidate, threshold)
    threshold = tl.where(threshold < 0, threshold ^ _VALUE_BITS, threshold)
    kept = tl.where(value < threshold.to(tl.float32, bitcast=True), float("-inf"), value)
    tl.store(out + row * columns + c, kept, mask=c < columns)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _topk_kernel(x, values, indices, columns, C: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Take the maximum of a row K times; of equal values the first."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, C)
    remaining = tl.load(x + row * columns + c, mask=c < columns, other=float("-inf"))
    remaining = tl.where(remaining == remaining, remaining, float("-inf"))  # NaN could yield the index of padding
    for rank in tl.static_range(K):
        best, index = tl.max(remaining, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + row * K + rank, best)
        tl.store(indices + row * K + rank, index.to(tl.int64))
        remaining = tl.where(c == index, float("-inf"), remaining)


def _num_warps(columns: int) -> int:
    return min(max(triton.next_power_of_2(columns) // 1024, 4), 32)


def topk_filter(x: Tensor, k: int | Tensor) -> Tensor:
    """Set everything below a row's k-th largest value to -inf: (..., K) float32 -> (..., K).

    A tensor k (B,) has one number for each of the B first indices of x.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty_like(rows)
    size = triton.next_power_of_2(x.shape[-1])
    with torch.cuda.device_of(x):
        ks = k if isinstance(k, Tensor) else constant((k,), torch.int64, x.device)
        per_k = len(rows) // len(ks)
        _topk_filter_kernel[(len(rows),)](rows, out, ks, x.shape[-1], per_k, C=size, num_warps=_num_warps(size))
    return out.view(x.shape)


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and indices (..., count) of the largest of (..., K) float32; indices of -inf may repeat."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values = torch.empty(len(rows), count, dtype=x.dtype, device=x.device)
    indices = torch.empty(len(rows), count, dtype=torch.int64, device=x.device)
    size = triton.next_power_of_2(x.shape[-1])
    with torch.cuda.device_of(x):
        _topk_kernel[(len(rows),)](rows, values, indices, x.shape[-1], C=size, K=count, num_warps=_num_warps(size))
    return values.view(*x.shape[:-1], count), indices.view(*x.shape[:-1], count)
