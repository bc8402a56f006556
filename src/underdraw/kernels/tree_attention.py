# ruff: noqa: N803
"""Flash-decoding attention of tree nodes to a KV cache, with bits that do not depend on the tree. Needs Triton.

The same token must get the same bits as a node of any tree, where its ancestors lie scattered over the slots behind the
committed tokens, and in plain decoding, where every token lies at its own position. Sums by tensor cores depend on
which keys share an instruction, so keys are divided by the *position* of the query:

- Slots below `boundary(position)`, at least TAIL positions back, hold the same committed tokens in both cases. They are
  read in blocks by tensor cores, dealt out to a number of splits that depends on the model alone. Keys of one
  instruction lie all below the boundary or all above it.
- The tail, the keys from the boundary up to the query itself, is summed by scalar FMAs in the order of slots, which is
  the order of positions along a path. Slots that are not ancestors have weight 0 and leave the sum as it is.

A tree is at most MAX_GPU_DEPTH deep, so no node of it lies below a boundary. A second kernel joins the splits and the
tail in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from underdraw.kernels.gemm import MAX_COUNTERS, arrival_counters
from underdraw.plan import MAX_GPU_DEPTH

TAIL = MAX_GPU_DEPTH + 1  # positions before a query that are summed one by one; more than a tree is deep
_GROUP = 16  # keys that a tensor core instruction sums together; boundaries are multiples of it
_BUSY = 264 * 64  # head widths in flight that keep an H200 busy: wide heads need fewer splits
_MAX_SPLITS = 16
_MIN_TILE = 16  # rows of a tensor core instruction


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tail_scores(  # type: ignore[no-untyped-def]
    query, keys, ancestors, cache, slot, end, length, boundary, node, is_query, a_row, a_node, a_slot, scale,
    WIDTH: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of some slots of the tail, -inf where a query does not see them."""
    inside = slot < end
    d = tl.arange(0, D)[None, :]
    key = tl.load(keys + cache + slot[:, None] * WIDTH + d, mask=inside[:, None] & (d < WIDTH), other=0.0)
    ahead = slot - length  # index of the node in a slot, negative for committed tokens
    mask = is_query[:, None] & (inside & (ahead >= 0))[None, :]
    is_ancestor = tl.load(ancestors + a_row + node[:, None] * a_node + ahead[None, :] * a_slot, mask=mask, other=0) != 0
    score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    seen = (inside & (ahead < 0))[None, :] | is_ancestor
    return tl.where(seen & (slot[None, :] >= boundary[:, None]), score, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _block_sums(  # type: ignore[no-untyped-def]
    query, keys, values, cache, boundary, split, end, capacity, scale,
    WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Largest score, weight and weighted values of every SPLITS-th block of slots below the boundaries."""
    d = tl.arange(0, D)
    largest = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([M, 16], tl.float32)  # sums by products have a fixed order; 16 columns are the fewest
    out = tl.zeros([M, D], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, values.dtype.element_ty)
    for start in range(split * KEYS, end, SPLITS * KEYS):
        slot = start + tl.arange(0, KEYS)
        block = cache + slot[:, None] * WIDTH + d[None, :]
        inside = (slot < capacity)[:, None] & (d < WIDTH)[None, :]
        key = tl.load(keys + block, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(slot[None, :] < boundary[:, None], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp(largest - base)
        value = tl.load(values + block, mask=inside, other=0.0)
        probs = tl.exp(score - base[:, None]).to(value.dtype)
        out = out * shrink[:, None] + tl.dot(probs, value, input_precision=PRECISION)
        weight = weight * shrink[:, None] + tl.dot(probs, ones, input_precision=PRECISION)
        largest = new
    return largest, tl.max(weight, 1), out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_tail(out, weight, score, largest, values, cache, slot, end, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the weights and weighted values of some slots of the tail, in the order of slots."""
    inside = (slot < end)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(values + cache + slot[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    probs = tl.exp(score - base[:, None]).to(value.dtype).to(tl.float32)
    # Float32 products without tensor cores: one FMA after the other, in the order of slots.
    out = tl.dot(probs, value.to(tl.float32), out, input_precision="ieee")
    return out, weight + tl.sum(probs.to(tl.float64), 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tail_sums(  # type: ignore[no-untyped-def]
    query, keys, values, ancestors, cache, column, first, end, length, boundary, node, is_query, a_row, a_node, a_slot,
    scale, WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr, TAIL_KEYS: tl.constexpr,
    TAIL_WIDTH: tl.constexpr, ONE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of the tail, for some value columns: the largest score first, then one slot after the other."""
    slots = tl.arange(0, TAIL_KEYS)
    largest = tl.full([M], float("-inf"), tl.float32)
    out = tl.zeros([M, TAIL_WIDTH], tl.float32)
    weight = tl.zeros([M], tl.float64)  # in float64 the order of summation does not matter
    if ONE_BLOCK:
        score = _tail_scores(
            query, keys, ancestors, cache, first + slots, end, length, boundary, node, is_query, a_row, a_node, a_slot,
            scale, WIDTH, D, PRECISION,
        )  # fmt: skip
        largest = tl.max(score, 1)
        out, weight = _add_tail(out, weight, score, largest, values, cache, first + slots, end, column, WIDTH)
    else:
        for start in range(first, end, TAIL_KEYS):
            score = _tail_scores(
                query, keys, ancestors, cache, start + slots, end, length, boundary, node, is_query, a_row, a_node,
                a_slot, scale, WIDTH, D, PRECISION,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(score, 1))
        for start in range(first, end, TAIL_KEYS):
            slot = start + slots
            score = _tail_scores(
                query, keys, ancestors, cache, slot, end, length, boundary, node, is_query, a_row, a_node, a_slot,
                scale, WIDTH, D, PRECISION,
            )  # fmt: skip
            out, weight = _add_tail(out, weight, score, largest, values, cache, slot, end, column, WIDTH)
    return largest, weight.to(tl.float32), out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _join_queries(  # type: ignore[no-untyped-def]
    part, top, total, out, pair, m, count, queries, GROUPS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add the splits and the tail of queries m of a row and key-value head, one after the other."""
    row, group = pair // GROUPS, pair % GROUPS
    d, is_query = tl.arange(0, D), m < queries
    largest = tl.full([M], float("-inf"), tl.float32)
    for split in range(PARTS):
        largest = tl.maximum(largest, tl.load(top + (pair * PARTS + split) * queries + m, mask=is_query, other=0.0))
    mean = tl.zeros([M, D], tl.float32)
    weight = tl.zeros([M], tl.float32)
    for split in range(PARTS):
        index = (pair * PARTS + split) * queries + m
        share = tl.exp(tl.load(top + index, mask=is_query, other=0.0) - largest)
        weight = tl.fma(share, tl.load(total + index, mask=is_query, other=1.0), weight)
        sums = tl.load(part + index[:, None].to(tl.int64) * D + d[None, :], mask=is_query[:, None], other=0.0)
        mean = tl.fma(tl.broadcast_to(share[:, None], [M, D]), sums, mean)
    mean = mean / weight[:, None]
    node, head = m % count, group * SHARE + m // count
    index = ((row * count + node) * (GROUPS * SHARE) + head).to(tl.int64)
    mask = is_query[:, None] & (d < WIDTH)[None, :]
    tl.store(out + index[:, None] * WIDTH + d[None, :], mean.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sums(  # type: ignore[no-untyped-def]
    q, keys, values, committed, depths, ancestors, part, top, total, out, arrived, q_row, q_node, q_head, k_row,
    k_group, d_image, a_image, a_node, a_slot, capacity, images, count, nodes, queries, scale, GROUPS: tl.constexpr,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    GROUP: tl.constexpr, TAIL: tl.constexpr, TAIL_KEYS: tl.constexpr, TAIL_WIDTH: tl.constexpr,
    TAIL_PARTS: tl.constexpr, ONE_BLOCK: tl.constexpr, JOIN: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax sums of M queries over one split of the blocks below their boundaries, or over the tail."""
    pair, split = tl.program_id(0), tl.program_id(1)
    row, group = pair // GROUPS, pair % GROUPS
    m = tl.program_id(2) * M + tl.arange(0, M)  # the heads of the group, each with all nodes
    node, head, is_query = m % count, group * SHARE + m // count, m < queries
    d = tl.arange(0, D)
    query = tl.load(
        q + row.to(tl.int64) * q_row + node[:, None] * q_node + head[:, None] * q_head + d[None, :],
        mask=is_query[:, None] & (d < WIDTH)[None, :], other=0.0,  # heads are padded to a power of two
    )  # fmt: skip
    length = tl.load(committed + row).to(tl.int32)
    depth = tl.load(depths + (row % images).to(tl.int64) * d_image + node, mask=is_query, other=0).to(tl.int32)
    boundary = tl.maximum(length + depth - TAIL, 0) // GROUP * GROUP
    cache = row.to(tl.int64) * k_row + group * k_group
    index = (pair * (SPLITS + 1) + tl.minimum(split, SPLITS)) * queries + m
    if split < SPLITS:
        end = tl.max(tl.where(is_query, boundary, 0), 0)
        largest, weight, sums = _block_sums(
            query, keys, values, cache, boundary, split, end, capacity, scale, WIDTH, M, D, KEYS, SPLITS, PRECISION
        )
        tl.store(top + index, largest, mask=is_query)
        tl.store(total + index, weight, mask=is_query)
        tl.store(part + index[:, None].to(tl.int64) * D + d[None, :], sums, mask=is_query[:, None])
    else:
        column = (split - SPLITS) * TAIL_WIDTH + tl.arange(0, TAIL_WIDTH)
        first = tl.min(tl.where(is_query, boundary, 2147483647), 0)
        last = nodes - count + tl.max(tl.where(is_query, node, 0), 0)  # no query sees a node behind itself
        end = tl.minimum(length + last + 1, capacity)
        largest, weight, tail_out = _tail_sums(
            query, keys, values, ancestors, cache, column, first, end, length, boundary, node, is_query,
            (row % images).to(tl.int64) * a_image, a_node, a_slot, scale, WIDTH, M, D, TAIL_KEYS, TAIL_WIDTH,
            ONE_BLOCK, PRECISION,
        )  # fmt: skip
        tl.store(top + index, largest, mask=is_query)  # the same from all columns
        tl.store(total + index, weight, mask=is_query)
        tl.store(part + index[:, None].to(tl.int64) * D + column[None, :], tail_out, mask=is_query[:, None])
    if JOIN:  # the last program of these queries joins their sums; which one that is does not change the order
        tl.debug_barrier()
        counter = arrived + pair * tl.num_programs(2) + tl.program_id(2)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS + TAIL_PARTS - 1:
            _join_queries(part, top, total, out, pair, m, count, queries, GROUPS, SHARE, WIDTH, SPLITS + 1, M, D)
            tl.store(counter, 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _join(  # type: ignore[no-untyped-def]
    part, top, total, out, count, queries, GROUPS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Some queries of a row and key-value head."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    _join_queries(part, top, total, out, tl.program_id(0), m, count, queries, GROUPS, SHARE, WIDTH, PARTS, M, D)


class AttentionTuning(NamedTuple):
    """How the work of a pass is divided; only `splits` changes bits, so it may not depend on the tree or the batch."""

    splits: int
    tail_parts: int  # programs that share the value columns of a tail
    tail_keys: int  # slots of the tail that are read at once
    min_tile: int  # smallest number of queries a program computes, padded
    joins: bool  # whether the last program of a tile joins its splits, instead of a second kernel
    warps: int
    stages: int


def splits_of(groups: int, width: int) -> int:
    """Splits of the blocks below the tail: a function of the model alone, enough for one guided picture."""
    return max(1, min(_BUSY // (2 * groups * width), _MAX_SPLITS))


def default_tuning(groups: int, width: int, queries: int, dtype: torch.dtype) -> AttentionTuning:
    """The fastest division of those timed on an H200."""
    splits = splits_of(groups, width)
    if queries > _MIN_TILE or dtype == torch.float32:
        return AttentionTuning(splits, 4, 32, _MIN_TILE, False, 4, 3)
    if queries > 8:
        return AttentionTuning(splits, 4, 128, _MIN_TILE, False, 4, 3)
    return AttentionTuning(splits, 2 if queries <= 2 else 4, 128, 1, queries <= 2, 4, 3)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    committed: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    tuning: AttentionTuning | None = None,
) -> Tensor:
    """q (R, N, H, D) against caches (R, G, L, D): (R, N, H * D).

    A node sees the `committed` (R,) slots of its row and, of the M slots behind them, its `ancestors` (B, N, M), which
    include itself. Rows are the guidance copies of B images; `depths` (B, N) are positions relative to `committed`.
    """
    rows, count, heads, width = q.shape
    groups, capacity = keys.shape[1:3]
    images, _, nodes = ancestors.shape
    queries = heads // groups * count
    tuning = tuning or default_tuning(groups, width, queries, q.dtype)
    is_float32 = q.dtype == torch.float32
    tile = min(max(triton.next_power_of_2(queries), tuning.min_tile), 32 if is_float32 else 64)
    pairs, splits, tiles = rows * groups, tuning.splits, triton.cdiv(queries, tile)
    padded_width = max(triton.next_power_of_2(width), 16)
    tail_width = max(padded_width // tuning.tail_parts, 16)
    tail_parts = padded_width // tail_width
    joins = tuning.joins and pairs * tiles <= MAX_COUNTERS
    part = torch.empty(pairs, splits + 1, queries, padded_width, dtype=torch.float32, device=q.device)
    top, total = torch.empty(2, pairs, splits + 1, queries, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, count, heads * width, dtype=q.dtype, device=q.device)
    depths = depths.contiguous()
    shape: dict[str, Any] = {"GROUPS": groups, "SHARE": heads // groups, "WIDTH": width, "D": padded_width}
    with torch.cuda.device_of(q):
        _sums[(pairs, splits + tail_parts, tiles)](
            q, keys, values, committed, depths, ancestors.view(torch.uint8), part, top, total, out,
            arrival_counters(q.device) if joins else total, *q.stride()[:3], *keys.stride()[:2], depths.stride(0),
            *ancestors.stride(), capacity, images, count, nodes, queries, width**-0.5, **shape, M=tile,
            KEYS=32 if is_float32 else 64, GROUP=_GROUP, TAIL=TAIL, TAIL_KEYS=tuning.tail_keys, TAIL_WIDTH=tail_width,
            TAIL_PARTS=tail_parts, ONE_BLOCK=TAIL + _GROUP - 1 + nodes <= tuning.tail_keys, JOIN=joins, SPLITS=splits,
            PRECISION="ieee" if is_float32 else "tf32", num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        if not joins:
            _join[(pairs, triton.cdiv(queries, 4))](
                part,
                top,
                total,
                out,
                count,
                queries,
                **shape,
                PARTS=splits + 1,
                M=4,
            )
    return out
