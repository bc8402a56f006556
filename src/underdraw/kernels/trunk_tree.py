# ruff: noqa: N803
"""Grows draft trees with a trunk in one kernel, where `drafters.trunk_tree` launches fifty. Needs Triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_LEAST_LOG_PROB = tl.constexpr(-32.0)  # of a branch: less probable nodes are never accepted
_HALVINGS = tl.constexpr(24)  # of the interval in which the least log probability of a node is searched
_PACK = tl.constexpr(1024)  # more than a tree has nodes


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _trunk_tree_kernel(  # type: ignore[no-untyped-def]
    tokens, log_probs, trunks, nodes, out_tokens, parents, depths, ranks, ancestors, t_image, t_level, p_image,
    p_level, trunk_stride, nodes_stride, levels, size, least, most, COUNT: tl.constexpr, LEVELS: tl.constexpr,
    RANKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One tree. A branch leaves the trunk at depth d with rank r >= 1, and goes on with first candidates.

    Its nodes become less probable with depth. So the nodes above a threshold are a run from depth d on, whose length is
    a count, and the threshold that leaves as many nodes as the tree may have is found by halving an interval.
    """
    image = tl.program_id(0).to(tl.int64)
    trunk = tl.minimum(tl.load(trunks + image * trunk_stride).to(tl.int32), levels - 1)
    budget = tl.minimum(tl.load(nodes + image * nodes_stride).to(tl.int32), size) - trunk - 1  # nodes of all branches
    level = tl.arange(0, LEVELS)
    probs = log_probs + image * p_image
    first = tl.load(probs + level * p_level, mask=level <= trunk, other=0.0)
    reach = tl.cumsum(tl.minimum(tl.maximum(first, least), most), 0)  # log probability of the trunk to each depth
    reach = tl.where(level <= trunk, reach, float("-inf"))
    branch = tl.arange(0, LEVELS * RANKS)
    begin, rank = branch // RANKS, branch % RANKS
    is_branch = (rank > 0) & (rank < COUNT) & (begin > 0) & (begin <= trunk)
    start = tl.load(probs + begin * p_level, mask=is_branch, other=0.0)
    deviation = tl.load(probs + begin * p_level + rank, mask=is_branch, other=float("-inf"))
    deviation = deviation - tl.minimum(tl.maximum(start, least), most)
    low = tl.full([], _LEAST_LOG_PROB, tl.float32)
    high = tl.full([], 0.0, tl.float32) - least  # a deviation is at most that much more probable than the trunk
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        run = tl.sum((reach[None, :] >= (middle - deviation)[:, None]).to(tl.int32), 1) - begin
        fits = tl.sum(tl.where(is_branch & (run > 0), run, 0), 0) <= budget
        high, low = tl.where(fits, middle, high), tl.where(fits, low, middle)
    run = tl.sum((reach[None, :] >= (high - deviation)[:, None]).to(tl.int32), 1) - begin
    run = tl.where(is_branch & (run > 0), run, 0)
    end = trunk + 1 + tl.cumsum(run, 0)  # behind the last node of each branch
    # Of every node: its branch and where the run of that branch begins, in one number.
    node = tl.arange(0, SIZE)
    is_member = ((end - run)[None, :] <= node[:, None]) & (node[:, None] < end[None, :])
    packed = tl.sum(tl.where(is_member, (branch * _PACK + end - run)[None, :], 0), 1)
    is_trunk = node <= trunk
    is_padding = node >= trunk + 1 + tl.sum(run, 0)
    node_begin = packed // _PACK // RANKS
    run_start = tl.where(is_padding, node, packed % _PACK)  # 0 for the trunk
    depth = tl.where(is_padding, 0, node_begin + node - run_start)
    is_first = (node == run_start) & ~is_trunk & ~is_padding
    node_rank = tl.where(is_first, packed // _PACK % RANKS, 0)
    out, is_inside = image * size + node, node < size
    token = tl.load(tokens + image * t_image + depth * t_level + node_rank, mask=is_inside)
    parent = tl.where(is_padding, 0, tl.where(is_first, node_begin - 1, node - 1))
    tl.store(out_tokens + out, token, mask=is_inside)
    tl.store(parents + out, parent.to(tl.int64), mask=is_inside)
    tl.store(depths + out, tl.where(is_padding, -1, depth).to(tl.int64), mask=is_inside)
    tl.store(ranks + out, node_rank.to(tl.int64), mask=is_inside)
    other = node[None, :]
    is_ancestor = ((other >= run_start[:, None]) & (other <= node[:, None])) | (other < node_begin[:, None])
    inside = is_inside[:, None] & (other < size)
    tl.store(ancestors + out[:, None] * size + other, is_ancestor, mask=inside)


def trunk_trees(
    tokens: Tensor, log_probs: Tensor, size: int, trunk: Tensor, nodes: Tensor, *, least: float, most: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, depths and ranks (B, N) and ancestors (B, N, N) of trees; see `drafters.trunk_tree`.

    Log probabilities of first candidates are clamped to `least` and `most`.
    """
    batch, levels, count = tokens.shape
    assert tokens.stride(2) == log_probs.stride(2) == 1, "candidates are contiguous"
    out = [torch.empty(batch, size, dtype=torch.int64, device=tokens.device) for _ in range(4)]
    ancestors = torch.empty(batch, size, size, dtype=torch.bool, device=tokens.device)
    padded = max(triton.next_power_of_2(levels), 16)
    with torch.cuda.device_of(tokens):
        _trunk_tree_kernel[(batch,)](
            tokens, log_probs, trunk, nodes, *out, ancestors, *tokens.stride()[:2], *log_probs.stride()[:2],
            trunk.stride(0) if len(trunk) > 1 else 0, nodes.stride(0) if len(nodes) > 1 else 0, levels, size, least,
            most, COUNT=count, LEVELS=padded, RANKS=triton.next_power_of_2(count),
            SIZE=max(triton.next_power_of_2(size), 16), num_warps=4 if padded <= 16 else 8 if padded <= 64 else 16,
        )  # fmt: skip
    return out[0], out[1], out[2], out[3], ancestors
