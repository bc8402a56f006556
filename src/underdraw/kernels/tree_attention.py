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

A tree is at most MAX_GPU_DEPTH deep, so no node of it lies below a boundary. Splits and tail are joined in a fixed
order: for few queries by the last program to finish, for many by a second kernel, which sums the tail as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from underdraw.kernels.attention_sums import add_tail, block_sums, tail_scores
from underdraw.kernels.gemm import MAX_COUNTERS, arrival_counters
from underdraw.plan import MAX_GPU_DEPTH, MAX_NODES

TAIL = MAX_GPU_DEPTH + 1  # positions before a query that are summed one by one; more than a tree is deep
_GROUP = 16  # keys that a tensor core instruction sums together; boundaries are multiples of it
_BUSY = 264 * 64  # head widths in flight that keep an H200 busy: wide heads need fewer splits
_MAX_SPLITS = 16
_MIN_TILE = 16  # rows of a tensor core instruction


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
        score = tail_scores(
            query, keys, ancestors, cache, first + slots, end, length, boundary, node, is_query, a_row, a_node, a_slot,
            scale, WIDTH, D, PRECISION,
        )  # fmt: skip
        largest = tl.max(score, 1)
        out, probs = add_tail(out, score, largest, values, cache, first + slots, end, column, WIDTH)
        weight = tl.sum(probs.to(tl.float64), 1)
    else:
        for start in range(first, end, TAIL_KEYS):
            score = tail_scores(
                query, keys, ancestors, cache, start + slots, end, length, boundary, node, is_query, a_row, a_node,
                a_slot, scale, WIDTH, D, PRECISION,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(score, 1))
        for start in range(first, end, TAIL_KEYS):
            slot = start + slots
            score = tail_scores(
                query, keys, ancestors, cache, slot, end, length, boundary, node, is_query, a_row, a_node, a_slot,
                scale, WIDTH, D, PRECISION,
            )  # fmt: skip
            out, probs = add_tail(out, score, largest, values, cache, slot, end, column, WIDTH)
            weight += tl.sum(probs.to(tl.float64), 1)
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
        largest, weight, sums = block_sums(
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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sums_and_scores(  # type: ignore[no-untyped-def]
    q, keys, values, committed, depths, ancestors, part, top, total, scores, q_row, q_node, q_head, k_row, k_group,
    d_image, a_image, a_node, a_slot, capacity, images, count, nodes, queries, span, scale, GROUPS: tl.constexpr,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
    GROUP: tl.constexpr, TAIL: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax sums of M queries over one split of the blocks, or the scores of their tail and the largest of them."""
    pair, split = tl.program_id(0), SPLITS - tl.program_id(1)  # the tail, which is the longest, starts first
    row, group = pair // GROUPS, pair % GROUPS
    m = tl.program_id(2) * M + tl.arange(0, M)
    node, head, is_query = m % count, group * SHARE + m // count, m < queries
    d = tl.arange(0, D)
    query = tl.load(
        q + row.to(tl.int64) * q_row + node[:, None] * q_node + head[:, None] * q_head + d[None, :],
        mask=is_query[:, None] & (d < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    length = tl.load(committed + row).to(tl.int32)
    depth = tl.load(depths + (row % images).to(tl.int64) * d_image + node, mask=is_query, other=0).to(tl.int32)
    boundary = tl.maximum(length + depth - TAIL, 0) // GROUP * GROUP
    cache = row.to(tl.int64) * k_row + group * k_group
    index = (pair * (SPLITS + 1) + split) * queries + m
    if split < SPLITS:
        end = tl.max(tl.where(is_query, boundary, 0), 0)
        largest, weight, sums = block_sums(
            query, keys, values, cache, boundary, split, end, capacity, scale, WIDTH, M, D, KEYS, SPLITS, PRECISION
        )
        tl.store(total + index, weight, mask=is_query)
        tl.store(part + index[:, None].to(tl.int64) * D + d[None, :], sums, mask=is_query[:, None])
    else:
        first = tl.min(tl.where(is_query, boundary, 2147483647), 0)
        origin = tl.maximum(length - TAIL, 0) // GROUP * GROUP  # first slot of the tail of a node of depth 0
        end = tl.minimum(length + nodes - count + tl.max(tl.where(is_query, node, 0), 0) + 1, capacity)
        largest = tl.full([M], float("-inf"), tl.float32)
        for start in range(first, end, KEYS):
            slot = start + tl.arange(0, KEYS)
            score = tail_scores(
                query, keys, ancestors, cache, slot, end, length, boundary, node, is_query,
                (row % images).to(tl.int64) * a_image, a_node, a_slot, scale, WIDTH, D, PRECISION,
            )  # fmt: skip
            largest = tl.maximum(largest, tl.max(score, 1))
            at = (pair.to(tl.int64) * span + slot - origin)[None, :] * queries + m[:, None]
            tl.store(scores + at, score, mask=is_query[:, None] & (slot < end)[None, :])
    tl.store(top + index, largest, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _tail_and_join(  # type: ignore[no-untyped-def]
    scores, values, committed, depths, part, top, total, out, k_row, k_group, d_image, capacity, images, count, nodes,
    queries, span, GROUPS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr, TAIL_KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sum the tail of M queries for some value columns from its scores, and add the splits to it."""
    pair = tl.program_id(0)
    row, group = pair // GROUPS, pair % GROUPS
    m, column = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    node, is_query = m % count, m < queries
    length = tl.load(committed + row).to(tl.int32)
    depth = tl.load(depths + (row % images).to(tl.int64) * d_image + node, mask=is_query, other=0).to(tl.int32)
    boundary = tl.maximum(length + depth - TAIL, 0) // GROUP * GROUP
    first = tl.min(tl.where(is_query, boundary, 2147483647), 0)
    origin = tl.maximum(length - TAIL, 0) // GROUP * GROUP
    end = tl.minimum(length + nodes - count + tl.max(tl.where(is_query, node, 0), 0) + 1, capacity)
    cache = row.to(tl.int64) * k_row + group * k_group
    tail_top = tl.load(top + (pair * (SPLITS + 1) + SPLITS) * queries + m, mask=is_query, other=0.0)
    sums = tl.zeros([M, COLUMNS], tl.float32)
    weights = tl.zeros([M, TAIL_KEYS], tl.float64)  # reduced after the loop, which is shorter without barriers
    for start in range(first, end, TAIL_KEYS):
        slot = start + tl.arange(0, TAIL_KEYS)
        at = (pair.to(tl.int64) * span + slot - origin)[None, :] * queries + m[:, None]
        score = tl.load(scores + at, mask=is_query[:, None] & (slot < end)[None, :], other=float("-inf"))
        sums, probs = add_tail(sums, score, tail_top, values, cache, slot, end, column, WIDTH)
        weights += probs.to(tl.float64)
    weight = tl.sum(weights, 1)
    largest = tail_top
    for split in range(SPLITS):
        index = (pair * (SPLITS + 1) + split) * queries + m
        largest = tl.maximum(largest, tl.load(top + index, mask=is_query, other=0.0))
    mean = tl.zeros([M, COLUMNS], tl.float32)
    divisor = tl.zeros([M], tl.float32)
    for split in range(SPLITS):
        index = (pair * (SPLITS + 1) + split) * queries + m
        share = tl.exp(tl.load(top + index, mask=is_query, other=0.0) - largest)
        divisor = tl.fma(share, tl.load(total + index, mask=is_query, other=1.0), divisor)
        block = tl.load(part + index[:, None].to(tl.int64) * D + column[None, :], mask=is_query[:, None], other=0.0)
        mean = tl.fma(tl.broadcast_to(share[:, None], [M, COLUMNS]), block, mean)
    share = tl.exp(tail_top - largest)
    divisor = tl.fma(share, weight.to(tl.float32), divisor)
    mean = tl.fma(tl.broadcast_to(share[:, None], [M, COLUMNS]), sums, mean) / divisor[:, None]
    at = ((row * count + node) * (GROUPS * SHARE) + group * SHARE + m // count).to(tl.int64)
    mask = is_query[:, None] & (column < WIDTH)[None, :]
    tl.store(out + at[:, None] * WIDTH + column[None, :], mean.to(out.dtype.element_ty), mask=mask)


class AttentionTuning(NamedTuple):
    """How the work of a pass is divided; only `splits` changes bits, so it may not depend on the tree or the batch."""

    splits: int
    tail_parts: int  # programs that share the value columns of a tail
    tail_keys: int  # slots of the tail that are read at once
    min_tile: int  # smallest number of queries a program computes, padded
    joins: bool  # whether the last program of a tile joins its splits, instead of a second kernel
    warps: int
    stages: int
    tail: TailTuning | None = None  # sums the tail in a second kernel, which joins the splits too


class TailTuning(NamedTuple):
    """How the second kernel divides the tails of many queries."""

    queries: int  # of a program
    columns: int  # value columns of a program
    keys: int  # slots that are read at once
    warps: int


TAIL_KERNEL = TailTuning(16, 64, 16, 4)  # for more queries than _MIN_TILE; for fewer one kernel is faster


def splits_of(groups: int, width: int) -> int:
    """Splits of the blocks below the tail: a function of the model alone, enough for one guided picture."""
    return max(1, min(_BUSY // (2 * groups * width), _MAX_SPLITS))


def default_tuning(groups: int, width: int, queries: int, dtype: torch.dtype) -> AttentionTuning:
    """The fastest division of those timed on an H200."""
    splits = splits_of(groups, width)
    if queries > _MIN_TILE or dtype == torch.float32:
        tail = TAIL_KERNEL if queries > _MIN_TILE else None
        return AttentionTuning(splits, 4, 32, _MIN_TILE, False, 4, 2, tail)
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
    pairs, splits = rows * groups, tuning.splits
    padded_width = max(triton.next_power_of_2(width), 16)
    part = torch.empty(pairs, splits + 1, queries, padded_width, dtype=torch.float32, device=q.device)
    top, total = torch.empty(2, pairs, splits + 1, queries, dtype=torch.float32, device=q.device)
    out = torch.empty(rows, count, heads * width, dtype=q.dtype, device=q.device)
    depths = depths.contiguous()
    strides = *q.stride()[:3], *keys.stride()[:2], depths.stride(0), *ancestors.stride()
    inputs = q, keys, values, committed, depths, ancestors.view(torch.uint8)
    sizes = capacity, images, count, nodes, queries
    constants: dict[str, Any] = {
        "GROUPS": groups, "SHARE": heads // groups, "WIDTH": width, "D": padded_width, "M": tile,
        "KEYS": 32 if is_float32 else 64, "GROUP": _GROUP, "TAIL": TAIL, "SPLITS": splits,
        "PRECISION": "ieee" if is_float32 else "tf32", "num_warps": tuning.warps, "num_stages": tuning.stages,
    }  # fmt: skip
    launch = _launch if tuning.tail is None or nodes > MAX_NODES else _launch_with_tail_kernel
    with torch.cuda.device_of(q):
        launch(_Call(inputs, (part, top, total), out, strides, sizes, constants), tuning)
    return out


class _Call(NamedTuple):
    """The arguments of the kernels."""

    inputs: tuple[Tensor, ...]  # queries, keys, values, committed slots, depths, ancestors
    sums: tuple[Tensor, Tensor, Tensor]  # weighted values, largest scores and weights of the splits and the tail
    out: Tensor
    strides: tuple[int, ...]
    sizes: tuple[int, ...]  # capacity, images, count, nodes, queries
    constants: dict[str, Any]


def _launch(call: _Call, tuning: AttentionTuning) -> None:
    """Blocks and tails in one kernel, which joins them for few queries; for many queries a second one does."""
    inputs, sums, out, strides, sizes, constants = call
    pairs, parts, queries, padded_width = sums[0].shape
    count, nodes, tiles = *sizes[2:4], triton.cdiv(queries, constants["M"])
    tail_width = max(padded_width // tuning.tail_parts, 16)
    tail_parts = padded_width // tail_width
    joins = tuning.joins and pairs * tiles <= MAX_COUNTERS
    _sums[(pairs, tuning.splits + tail_parts, tiles)](
        *inputs, *sums, out, arrival_counters(out.device) if joins else sums[2], *strides, *sizes,
        constants["WIDTH"] ** -0.5, **constants, TAIL_KEYS=tuning.tail_keys, TAIL_WIDTH=tail_width,
        TAIL_PARTS=tail_parts, ONE_BLOCK=TAIL + _GROUP - 1 + nodes <= tuning.tail_keys, JOIN=joins,
    )  # fmt: skip
    if not joins:
        shape = {name: constants[name] for name in ("GROUPS", "SHARE", "WIDTH", "D")}
        _join[(pairs, triton.cdiv(queries, 4))](*sums, out, count, queries, **shape, PARTS=parts, M=4)


def _launch_with_tail_kernel(call: _Call, tuning: AttentionTuning) -> None:
    """Blocks and scores of tails in one kernel; a second one sums the tails and joins."""
    assert tuning.tail is not None
    inputs, sums, out, strides, sizes, constants = call
    pairs, parts, queries, padded_width = sums[0].shape
    span = TAIL + _GROUP + sizes[3]  # slots of a tail, at most
    scores = torch.empty(pairs, span, queries, dtype=torch.float32, device=out.device)
    _sums_and_scores[(pairs, parts, triton.cdiv(queries, constants["M"]))](
        *inputs, *sums, scores, *strides, *sizes, span, constants["WIDTH"] ** -0.5, **constants
    )
    rows, columns = min(tuning.tail.queries, constants["M"]), min(tuning.tail.columns, padded_width)
    names = ("GROUPS", "SHARE", "WIDTH", "D", "GROUP", "TAIL", "SPLITS")
    _tail_and_join[(pairs, triton.cdiv(queries, rows), padded_width // columns)](
        scores, *inputs[2:5], *sums, out, *strides[3:6], *sizes, span, **{name: constants[name] for name in names},
        M=rows, COLUMNS=columns, TAIL_KEYS=tuning.tail.keys, num_warps=tuning.tail.warps, num_stages=3,
    )  # fmt: skip
