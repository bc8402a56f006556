# ruff: noqa: N803
"""Attention of a few nodes to a long cache on a GPU: every head's share of the cache is split among many processors.

A fused kernel gives one head of one row to one processor, which reads the whole cache alone while most others have
nothing to do. Here they take turns, a block of slots each; a second, small kernel joins what they found. What a row
does not hold is not read, so a pass may look at the whole cache and costs what is in it. Which processor reads a slot,
and when, does not depend on what else is there, so a token finds the same sums alone and in a short chain.
Needs triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

NARROWEST = 16  # of what a matrix unit multiplies
_KEYS = 64  # cache slots at a time, and queries
_STAGES = 3  # of those that are on their way
_BUSY = 264 * 64  # numbers of heads that a device works on at once: the wider they are, the fewer blocks


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _parts(  # type: ignore[no-untyped-def]
    q, keys, values, committed, ancestors, part, top, total, q_row, q_node, q_head, k_row, k_group, a_image, a_node,
    a_slot, length, count, nodes, rows, images, scale, GROUPS: tl.constexpr, SHARE: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries of one row and group against some blocks: sums of values, the largest score and the sum of weights."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, group = pair // GROUPS, pair % GROUPS
    m = tl.program_id(2) * M + tl.arange(0, M)  # heads of the group, each with all nodes
    there, node, head = m < rows, m % count, group * SHARE + m // count
    d = tl.arange(0, D)
    query = tl.load(
        q + row * q_row + node[:, None] * q_node + head[:, None] * q_head + d, mask=there[:, None], other=0.0
    )
    known = tl.load(committed + row).to(tl.int32)
    used = tl.minimum(known + nodes, length)
    line = ancestors + (row % images).to(tl.int64) * a_image + node[:, None] * a_node
    largest = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    cache = row.to(tl.int64) * k_row + group * k_group
    for first in range(split * KEYS, used, tl.num_programs(1) * KEYS):
        slot = first + tl.arange(0, KEYS)
        inside = slot < used
        place = cache + slot[:, None] * D + d
        key = tl.load(keys + place, mask=inside[:, None], other=0.0)
        ahead = slot - known  # the node in a slot, negative for committed tokens
        above = tl.load(line + ahead * a_slot, mask=there[:, None] & inside & (ahead >= 0), other=0) != 0
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(inside & ((ahead < 0) | above), score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        chance = tl.exp(score - base[:, None])
        shrink = tl.exp(largest - base)
        value = tl.load(values + place, mask=inside[:, None], other=0.0)
        out = out * shrink[:, None] + tl.dot(chance.to(value.dtype), value, input_precision=PRECISION)
        weight = weight * shrink + tl.sum(chance, 1)
        largest = new
    index = (pair * tl.num_programs(1) + split) * rows + m
    tl.store(top + index, largest, mask=there)
    tl.store(total + index, weight, mask=there)
    tl.store(part + index[:, None] * D + d, out, mask=there[:, None])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    part, top, total, out, splits, count, rows, GROUPS: tl.constexpr, SHARE: tl.constexpr, S: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Some queries: what all blocks found, weighed by their largest scores."""
    pair, m = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    row, group = pair // GROUPS, pair % GROUPS
    s, d = tl.arange(0, S)[:, None], tl.arange(0, D)
    index = (pair * splits + s) * rows + m  # (S, M)
    there = (s < splits) & (m < rows)
    largest = tl.load(top + index, mask=there, other=float("-inf"))
    share = tl.where(there, tl.exp(largest - tl.max(largest, 0)), 0.0)
    weight = tl.sum(share * tl.load(total + index, mask=there, other=0.0), 0)
    found = tl.load(part + index[:, :, None] * D + d, mask=there[:, :, None], other=0.0)
    mean = tl.sum(found * share[:, :, None], 0) / weight[:, None]
    place = (row * count + m % count) * GROUPS * SHARE + group * SHARE + m // count
    tl.store(out + place[:, None] * D + d, mean.to(out.dtype.element_ty), mask=(m < rows)[:, None])


def tree_attention(q: Tensor, keys: Tensor, values: Tensor, committed: Tensor, ancestors: Tensor) -> Tensor:
    """q (R, N, H, D) against caches (R, G, L, D): all `committed` (R,) slots, and of the M behind them the ancestors.

    Rows are copies of B images, with ancestors (B, N, M).
    """
    batch, count, heads, width = q.shape
    groups, length = keys.shape[1:3]
    images, _, nodes = ancestors.shape
    rows = heads // groups * count  # queries of one group
    widest = 32 if q.dtype == torch.float32 else _KEYS  # queries, and slots at a time: what the registers hold
    block = min(max(triton.next_power_of_2(rows), NARROWEST), widest)
    pairs, blocks = batch * groups, -(-rows // block)
    splits = max(1, min(_BUSY // (pairs * blocks * width), -(-length // widest)))
    part = torch.empty(pairs, splits, rows, width, dtype=torch.float32, device=q.device)
    top, total = torch.empty(2, pairs, splits, rows, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, count, heads * width, dtype=q.dtype, device=q.device)
    shape: dict[str, Any] = {"GROUPS": groups, "SHARE": heads // groups, "D": width}
    with torch.cuda.device_of(q):
        _parts[(pairs, splits, blocks)](
            q, keys, values, committed, ancestors.view(torch.uint8), part, top, total, *q.stride()[:3],
            *keys.stride()[:2], *ancestors.stride(), length, count, nodes, rows, images, width**-0.5, **shape,
            M=block, KEYS=widest, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_stages=_STAGES,
        )  # fmt: skip
        together = 8 if rows > NARROWEST else 1
        _join[(pairs, -(-rows // together))](
            part, top, total, out, splits, count, rows, **shape, S=triton.next_power_of_2(splits), M=together
        )  # fmt: skip
    return out
