# ruff: noqa: N803
"""Flash-decoding for draft trees: attention of a few nodes to a long KV cache, with the cache split among blocks.

A fused attention kernel gives one head of one row to one thread block, which reads the whole cache alone while most
multiprocessors idle. Here the slots of a head are dealt out, `_BLOCK_SLOTS` at a time and round robin, to several
thread blocks (split-KV); a second, small kernel combines their partial softmax sums. Slots past the end of a row are
not read, so the launch may cover the whole cache and costs what the row holds. Which block reads a slot, and in which
order, does not depend on the other nodes: a token gets the same sums alone and in a short chain.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

MIN_TILE = 16  # smallest side of a tile that tensor cores multiply
_BLOCK_SLOTS = 64  # cache slots read at a time, and most queries of a thread block
_NUM_STAGES = 3  # software pipelining of the loads
_RESIDENT_VALUES = 264 * 64  # thread blocks that a device keeps busy, times head width: wide heads get fewer blocks


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _split_kv_kernel(  # type: ignore[no-untyped-def]
    q, keys, values, committed, ancestors,
    partial_out, partial_max, partial_sum,
    q_row_stride, q_node_stride, q_head_stride, kv_row_stride, kv_head_stride,
    ancestors_image_stride, ancestors_node_stride, ancestors_slot_stride,
    length, count, nodes, queries, images, scale,
    KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M queries of one row and KV head over one split of the slots: weighted values, largest score, sum of weights."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, kv_head = pair // KV_HEADS, pair % KV_HEADS
    m = tl.program_id(2) * M + tl.arange(0, M)  # all nodes of the first head that shares these keys, then the next
    is_query, node, head = m < queries, m % count, kv_head * HEADS_PER_KV + m // count
    d = tl.arange(0, D)
    query = tl.load(
        q + row * q_row_stride + node[:, None] * q_node_stride + head[:, None] * q_head_stride + d,
        mask=is_query[:, None],
        other=0.0,
    )
    row_length = tl.load(committed + row).to(tl.int32)
    used = tl.minimum(row_length + nodes, length)
    ancestor_row = ancestors + (row % images).to(tl.int64) * ancestors_image_stride
    ancestor_row += node[:, None] * ancestors_node_stride
    max_score = tl.full([M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    cache = row.to(tl.int64) * kv_row_stride + kv_head * kv_head_stride
    for first in range(split * BLOCK_SLOTS, used, tl.num_programs(1) * BLOCK_SLOTS):
        slot = first + tl.arange(0, BLOCK_SLOTS)
        is_used = slot < used
        offset = cache + slot[:, None] * D + d
        key = tl.load(keys + offset, mask=is_used[:, None], other=0.0)
        slot_node = slot - row_length  # the tree node in a slot, negative for committed tokens
        is_tree_slot = is_query[:, None] & is_used & (slot_node >= 0)
        is_ancestor = tl.load(ancestor_row + slot_node * ancestors_slot_stride, mask=is_tree_slot, other=0) != 0
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(is_used & ((slot_node < 0) | is_ancestor), score, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(score, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # nothing visible yet: avoid inf - inf
        weight = tl.exp(score - base[:, None])
        rescale = tl.exp(max_score - base)
        value = tl.load(values + offset, mask=is_used[:, None], other=0.0)
        out = out * rescale[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        weight_sum = weight_sum * rescale + tl.sum(weight, 1)
        max_score = new_max
    index = (pair * tl.num_programs(1) + split) * queries + m
    tl.store(partial_max + index, max_score, mask=is_query)
    tl.store(partial_sum + index, weight_sum, mask=is_query)
    tl.store(partial_out + index[:, None] * D + d, out, mask=is_query[:, None])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _combine_splits_kernel(  # type: ignore[no-untyped-def]
    partial_out, partial_max, partial_sum, out,
    splits, count, queries,
    KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, S: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of all splits for M queries, rescaled to the largest score of all."""
    pair, m = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    row, kv_head = pair // KV_HEADS, pair % KV_HEADS
    s, d = tl.arange(0, S)[:, None], tl.arange(0, D)
    index = (pair * splits + s) * queries + m  # (S, M)
    mask = (s < splits) & (m < queries)
    max_score = tl.load(partial_max + index, mask=mask, other=float("-inf"))
    rescale = tl.where(mask, tl.exp(max_score - tl.max(max_score, 0)), 0.0)
    weight_sum = tl.sum(rescale * tl.load(partial_sum + index, mask=mask, other=0.0), 0)
    partial = tl.load(partial_out + index[:, :, None] * D + d, mask=mask[:, :, None], other=0.0)
    mean = tl.sum(partial * rescale[:, :, None], 0) / weight_sum[:, None]
    head = (row * count + m % count) * KV_HEADS * HEADS_PER_KV + kv_head * HEADS_PER_KV + m // count
    tl.store(out + head[:, None] * D + d, mean.to(out.dtype.element_ty), mask=(m < queries)[:, None])


def tree_attention(q: Tensor, keys: Tensor, values: Tensor, committed: Tensor, ancestors: Tensor) -> Tensor:
    """Attend from q (R, N, H, D) to caches (R, G, L, D) of G KV heads: (R, N, H * D).

    A node sees the first `committed` (R,) slots of its row, and of the M nodes in the slots behind them its ancestors
    (B, N, M). Rows are copies of B images.
    """
    rows, count, heads, width = q.shape
    kv_heads, length = keys.shape[1:3]
    images, _, nodes = ancestors.shape
    queries = heads // kv_heads * count  # that share the keys of one KV head
    block_slots = 32 if q.dtype == torch.float32 else _BLOCK_SLOTS  # what the registers hold
    block_queries = min(max(triton.next_power_of_2(queries), MIN_TILE), block_slots)
    pairs, query_blocks = rows * kv_heads, -(-queries // block_queries)
    splits = max(1, min(_RESIDENT_VALUES // (pairs * query_blocks * width), -(-length // block_slots)))
    partial_out = torch.empty(pairs, splits, queries, width, dtype=torch.float32, device=q.device)
    partial_max, partial_sum = torch.empty(2, pairs, splits, queries, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, count, heads * width, dtype=q.dtype, device=q.device)
    shape: dict[str, Any] = {"KV_HEADS": kv_heads, "HEADS_PER_KV": heads // kv_heads, "D": width}
    with torch.cuda.device_of(q):
        _split_kv_kernel[(pairs, splits, query_blocks)](
            q, keys, values, committed, ancestors.view(torch.uint8),
            partial_out, partial_max, partial_sum,
            *q.stride()[:3], *keys.stride()[:2], *ancestors.stride(),
            length, count, nodes, queries, images, width**-0.5,
            **shape, M=block_queries, BLOCK_SLOTS=block_slots,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_stages=_NUM_STAGES,
        )  # fmt: skip
        combined = 8 if queries > MIN_TILE else 1  # queries of a thread block
        _combine_splits_kernel[(pairs, -(-queries // combined))](
            partial_out, partial_max, partial_sum, out,
            splits, count, queries,
            **shape, S=triton.next_power_of_2(splits), M=combined,
        )  # fmt: skip
    return out
