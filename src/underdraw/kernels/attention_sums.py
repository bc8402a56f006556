# ruff: noqa: N803
"""Scores and softmax sums of queries over parts of a KV cache: the steps of `tree_attention`. Needs Triton."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def tail_scores(  # type: ignore[no-untyped-def]
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
def block_sums(  # type: ignore[no-untyped-def]
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
def add_tail(out, score, largest, values, cache, slot, end, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the weighted values of some slots of the tail, in the order of slots; also returns the weights."""
    inside = (slot < end)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(values + cache + slot[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    probs = tl.exp(score - base[:, None]).to(value.dtype).to(tl.float32)
    # Float32 products without tensor cores: one FMA after the other, in the order of slots.
    return tl.dot(probs, value.to(tl.float32), out, input_precision="ieee"), probs
