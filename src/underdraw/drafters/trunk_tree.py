"""Trees with a trunk: a chain of first candidates, and branches that deviate from it once.

The candidates of a step do not depend on the path before it. So a branch is given by the depth and rank of its
deviation, its probability down to any depth is a sum of three logarithms, and the best nodes of all branches are found
by two top-k selections, without a loop over levels or nodes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.constants import arange_cached
from underdraw.tree import DraftTree, chain


def grow_trunk_tree(
    root: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    size: int,
    *,
    trunk: Tensor,
    nodes: Tensor,
    min_probability: float = 0.0,
) -> DraftTree:
    """B trees of `size` nodes: the first `trunk` (B,) candidates in a chain, then the most probable branches.

    root (B,); tokens (B, D, k) are the candidates of depths 1 to D and log_probs (B, D, k) their log probabilities of
    being accepted, -inf for candidates that must not be used; those of rank 0 must be finite. Tree b has at most
    nodes[b] > trunk[b] nodes, the root included. Nodes of branches below `min_probability` are left out.
    """
    depth, ranks = tokens.shape[1:]
    if ranks == 1:
        return chain(torch.cat([root[:, None], tokens[..., 0]], dim=1)[:, :size], trunk)
    first = log_probs[..., 0]  # (B, D)
    reach = first.cumsum(1)  # log probability that the trunk is accepted down to each depth
    in_trunk = arange_cached(depth, root.device) < trunk[:, None]
    # Log probability of a branch down to depth e, if it deviates at depth d with rank r: deviation[d, r] + reach[e].
    deviation = log_probs[..., 1:] - first[..., None]
    starts = (deviation + reach[..., None]).masked_fill(~in_trunk[..., None], -torch.inf).flatten(1)
    best_starts = starts.topk(min(size - 1, starts.shape[1]), dim=1).indices  # (B, R); no other branch can be kept
    begin = best_starts // (ranks - 1)  # depth - 1 of the deviation
    branch_log_probs = deviation.flatten(1).gather(1, best_starts)[..., None] + reach[:, None]  # (B, R, D)
    excluded = ~in_trunk[:, None] | (arange_cached(depth, root.device) < begin[..., None])
    if min_probability:
        excluded = excluded | (branch_log_probs < math.log(min_probability))
    branch_log_probs = branch_log_probs.masked_fill(excluded, -torch.inf)
    # Branch 0 is the trunk, which is always kept.
    trunk_log_probs = torch.where(in_trunk, torch.inf, -torch.inf)
    every = torch.cat([trunk_log_probs[:, None], branch_log_probs], dim=1).flatten(1)
    values, index = every.topk(min(size - 1, every.shape[1]), dim=1)
    order = arange_cached(index.shape[1], root.device)
    is_padding = (values == -torch.inf) | (order >= nodes[:, None] - 1)
    # Sorted by branch: each one is a run of nodes, whichever of equally probable nodes top-k took.
    branch = (index // depth).masked_fill(is_padding, every.shape[1]).sort(dim=1).values
    return _tree_of_runs(
        root, tokens, branch, functional.pad(begin, (1, 0)), functional.pad(best_starts % (ranks - 1) + 1, (1, 0))
    )


def _tree_of_runs(root: Tensor, tokens: Tensor, branch: Tensor, begin: Tensor, rank: Tensor) -> DraftTree:
    """The tree whose nodes 1, 2, ... belong to the sorted branches (B, M); those past the last one are padding.

    `begin` and `rank` (B, R) are depth - 1 and rank of the first node of each branch. Branch 0 is the trunk, so that
    its node of depth d has index d.
    """
    count, ranks = branch.shape[1], tokens.shape[2]
    index = arange_cached(count + 1, root.device)  # of nodes
    is_padding = branch >= begin.shape[1]
    inside = branch.masked_fill(is_padding, 0)
    is_first = functional.pad(branch[:, 1:] != branch[:, :-1], (1, 0), value=True)
    run_start = torch.where(is_first, index[1:], 0).cummax(1).values  # index of the first node of the run
    begin, rank = begin.gather(1, inside), torch.where(is_first, rank.gather(1, inside), 0)
    level = (begin + index[1:] - run_start).masked_fill(is_padding, 0)  # depth - 1
    drafted = tokens.flatten(1).gather(1, level * ranks + rank)
    parents = torch.where(is_first, begin, index[:-1]).masked_fill(is_padding, 0)
    # The ancestors of a node: its run up to the node, and the trunk down to where the run begins.
    run_start = functional.pad(torch.where(is_padding, index[1:], run_start), (1, 0))
    begin = functional.pad(begin.masked_fill(is_padding, -1), (1, 0))
    in_run = (index >= run_start[..., None]) & (index <= index[:, None])
    return DraftTree(
        torch.cat([root[:, None], drafted], dim=1),
        functional.pad(parents, (1, 0), value=-1),
        functional.pad((level + 1).masked_fill(is_padding, -1), (1, 0)),
        in_run | (index <= begin[..., None]),
        functional.pad(rank, (1, 0)),
        ranks,
    )
