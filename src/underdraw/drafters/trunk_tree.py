"""Trees with a trunk: a chain of first candidates, and branches that deviate from it once.

The candidates of a step do not depend on the path before it. So a branch is given by the depth and rank of its
deviation, its probability down to any depth is a sum of logarithms, and the best nodes of all branches are found by two
top-k selections, without a loop over levels or nodes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from underdraw.constants import arange_cached
from underdraw.nn.attention import triton_available
from underdraw.tree import DraftTree

_TRUNK = 1e9  # log probability that puts the trunk before all branches
_LEAST, _MOST = -20.0, -1e-3  # log probabilities of first candidates: a longer branch is always less probable


@functools.cache  # unbounded: CUDA graphs keep reading these tensors
def _branch_bonus(depth: int, ranks: int, device: torch.device) -> Tensor:
    """Added to the log probability of a branch by depth and rank of its first node (D + 1, k).

    The trunk is the branch that starts at the root with rank 0; other branches start with rank 1 or more.
    """
    bonus = torch.zeros(depth + 1, ranks)
    bonus[:, 0] = -torch.inf
    bonus[0, 0] = _TRUNK
    return bonus.to(device)


def grow_trunk_tree(
    tokens: Tensor,
    log_probs: Tensor,
    size: int,
    *,
    trunk: Tensor,
    nodes: Tensor,
    min_probability: float = 0.0,
) -> DraftTree:
    """B trees of at most `size` nodes: the first `trunk` (B,) candidates in a chain, then the most probable branches.

    tokens (B, D + 1, k) are the candidates of depths 0 to D, tokens[:, 0, 0] the roots; log_probs (B, D + 1, k) their
    log probabilities of being accepted, finite at rank 0 and -inf for candidates that must not be used, such as all of
    depth 0 but the root. Tree b has at most nodes[b] > trunk[b] nodes. Nodes of branches below `min_probability` are
    left out.
    """
    if not min_probability and triton_available(tokens.device):
        from underdraw.kernels.trunk_tree import trunk_trees

        parts = trunk_trees(tokens, log_probs, size, trunk, nodes, least=_LEAST, most=_MOST)
        drafted, parents, node_depths, node_ranks, ancestors = parts
        return DraftTree(drafted, parents, node_depths, ancestors, node_ranks, tokens.shape[2])
    levels, ranks = tokens.shape[1:]
    depths = arange_cached(levels, tokens.device)
    first = log_probs[..., 0].clamp(_LEAST, _MOST)
    reach = torch.where(depths <= trunk[:, None], first.cumsum(1), -torch.inf)  # (B, D + 1) of the trunk to each depth
    # Log probability of a branch down to depth e, if it starts at depth d with rank r: deviation[d, r] + reach[e].
    deviation = log_probs - first[..., None] + _branch_bonus(levels - 1, ranks, tokens.device)
    starts = (deviation + reach[..., None]).flatten(1)
    branches = starts.topk(min(size, levels * ranks), dim=1).indices  # (B, R) depth * k + rank; the trunk is the first
    branch_log_probs = deviation.flatten(1).gather(1, branches)[..., None] + reach[:, None]  # (B, R, D + 1)
    is_excluded = depths < (branches // ranks)[..., None]
    if min_probability:
        is_excluded = is_excluded | (branch_log_probs < math.log(min_probability))
    branch_log_probs = branch_log_probs.masked_fill(is_excluded, -torch.inf).flatten(1)
    values, index = branch_log_probs.topk(min(size, branch_log_probs.shape[1]), dim=1)
    order = arange_cached(index.shape[1], tokens.device)
    is_node = (values > -torch.inf) & (order < nodes[:, None])
    # Sorted, every branch is a run of nodes in order of depth, and padding comes last.
    index = torch.where(is_node, index, branch_log_probs.shape[1]).sort(dim=1).values
    return _tree_of_runs(tokens, branches, index)


def _tree_of_runs(tokens: Tensor, branches: Tensor, index: Tensor) -> DraftTree:
    """The tree of sorted nodes (B, N), each given as (row of `branches`) * (D + 1) + depth; larger ones are padding.

    The trunk is the first branch, so its node of depth d has index d, and the root index 0.
    """
    levels, ranks = tokens.shape[1:]
    nodes = arange_cached(index.shape[1], tokens.device)
    is_padding = index >= branches.shape[1] * levels
    index = index.masked_fill(is_padding, 0)
    depth, branch = index % levels, branches.gather(1, index // levels)
    begin = branch // ranks  # depth of the first node of the run
    is_first = depth == begin
    rank = torch.where(is_first, branch % ranks, 0)
    run_start = nodes - depth + begin
    # The ancestors of a node: the trunk down to where its run begins, and its run.
    in_run = (nodes >= run_start[..., None]) & (nodes <= nodes[:, None])
    return DraftTree(
        tokens.flatten(1).gather(1, depth * ranks + rank),
        torch.where(is_first, begin - 1, nodes - 1).masked_fill(is_padding, 0),
        depth.masked_fill(is_padding, -1),
        in_run | (nodes < begin[..., None]),
        rank,
        ranks,
    )
