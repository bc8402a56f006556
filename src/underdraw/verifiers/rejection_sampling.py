"""Recursive rejection sampling down a tree, shared by the rejection and LANTERN verifiers.

At a node with target probs p the children are tried in order. A child x sampled from q is accepted with probability
p(x) / q(x); after a rejection p becomes norm(max(p - q, 0)) and x is removed from q. A child that was picked instead of
sampled (q is None) is the case q(x) = 1: accepted with probability p(x), then removed from p. If all children are
rejected, the next token is sampled from the residual p. Tokens are distributed exactly as p. A relaxed rule accepts x
with another probability, or leaves another residual.

Shapes: B trees, N nodes, M nodes of all trees together, K image codes, V vocabulary indices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from underdraw.layout import Layout
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree
from underdraw.verifiers.tree_walk import gather_nodes, walk_tree

RejectionRule = Callable[[Tensor, "Tensor | None", Tensor], tuple[Tensor, Tensor]]
"""Probs p (M, V), the remaining q (M, V) or None, and children x (M, 1) as vocabulary indices -> p'(x) (M, 1), which
over q(x), if there is a q, is the probability of accepting x, and the residual of p after a rejection (M, V)."""


def exact_rule(probs: Tensor, q: Tensor | None, child: Tensor) -> tuple[Tensor, Tensor]:
    """The rule that keeps the distribution: p(x), and p without x or max(p - q, 0)."""
    residual = probs.scatter(1, child, 0.0) if q is None else (probs - q).clamp_(min=0)
    return probs.gather(1, child), residual


def rejection_walk(tree: DraftTree, logits: Tensor, noise_window: NoiseWindow, rule: RejectionRule) -> AcceptedPath:
    """Accepted paths of B trees; logits (B, N, K) are the target's at every node."""
    reach = noise_window.steps.shape[1]
    children = child_indices(tree, noise_window.sampler.layout)  # (B, N, branch)
    uniform = noise_window.uniform(tree.branch)  # (B, reach, branch)

    def choose_child(nodes: Tensor | None) -> tuple[Tensor, Tensor]:
        depths = gather_nodes(tree.depths, nodes)
        probs = target_probs(gather_nodes(logits, nodes), depths, noise_window)
        q = None if tree.q is None else gather_nodes(tree.q, nodes).flatten(0, 1)
        tests = gather_nodes(uniform, depths.clamp(0, reach - 1)).flatten(0, 1)
        rank, residual = try_children(probs.flatten(0, 1), q, gather_nodes(children, nodes).flatten(0, 1), tests, rule)
        return rank.view_as(depths), residual.view_as(probs)

    path, length, residual = walk_tree(tree, reach, choose_child)
    scores = residual.log()
    if noise_window.noise is not None:  # the residual is sampled with the noise of the step that it is for
        scores = scores + gather_nodes(noise_window.noise, length[:, None])[:, 0]
    return AcceptedPath(path, length, noise_window.sampler.layout.token_ids(scores.argmax(-1)))


def try_children(
    probs: Tensor, q: Tensor | None, children: Tensor, uniform: Tensor, rule: RejectionRule
) -> tuple[Tensor, Tensor]:
    """Try the children of M nodes in order of rank.

    `probs` and `q` are (M, V), `children` and `uniform` (M, branch); a child of -1 does not exist. Returns the rank of
    the accepted child (M,), `branch` if there is none, and then the residual probs (M, V).
    """
    is_missing, children = children < 0, children.clamp(min=0)
    if q is not None:
        is_missing |= q.gather(1, children) <= 0  # underflowed in float32: neither tried nor subtracted
    uniform = uniform.masked_fill(is_missing, torch.nan)  # makes every comparison below false
    remaining_q = None if q is None else q.clone()
    thresholds, child_probs = [], []  # (M, 1) per rank: accepted where threshold < prob
    for child, test in zip(children.split(1, dim=1), uniform.split(1, dim=1), strict=True):  # (M, 1)
        child_prob, residual = rule(probs, remaining_q, child)
        threshold = test
        if remaining_q is not None:
            threshold = test * remaining_q.gather(1, child)
            remaining_q.scatter_(1, child, 0.0)
            remaining_q.div_(remaining_q.sum(1, keepdim=True).clamp_(min=torch.finfo(remaining_q.dtype).tiny))
        total = residual.sum(1, keepdim=True)
        # An empty residual means that the child had to be accepted; only rounding can lead here. Then keep p.
        is_rejected = torch.logical_and(threshold >= child_prob, total)
        probs = torch.where(is_rejected, residual / total, probs)
        thresholds.append(threshold)
        child_probs.append(child_prob)
    return first_accepted(torch.cat(thresholds, dim=1) < torch.cat(child_probs, dim=1)), probs


def first_accepted(is_accepted: Tensor) -> Tensor:
    """The lowest accepted rank, or `branch` if there is none: (..., branch) -> (...)."""
    return (is_accepted.cumsum(-1) == 0).sum(-1)


def child_indices(tree: DraftTree, layout: Layout) -> Tensor:
    """Vocabulary index of the child of each node at each rank, -1 where there is none: (B, N, branch)."""
    (batch, size), branch = tree.tokens.shape, tree.branch
    # Roots and padding write into one extra entry, which is dropped.
    entry = torch.where(tree.depths > 0, tree.parents * branch + tree.ranks, size * branch)
    table = tree.tokens.new_full((batch, size * branch + 1), -1).scatter_(1, entry, layout.vocab_indices(tree.tokens))
    return table[:, :-1].unflatten(1, (size, branch))


def target_probs(logits: Tensor, depths: Tensor, noise_window: NoiseWindow) -> Tensor:
    """Probs that plain decoding samples from at nodes of these depths: (B, W, K), (B, W) -> (B, W, V) float64."""
    filtered = noise_window.filtered_logits(logits, depths + 1)
    if noise_window.noise is None:
        return torch.zeros_like(filtered, dtype=torch.float64).scatter_(-1, filtered.argmax(-1, keepdim=True), 1.0)
    return filtered.double().softmax(-1)
