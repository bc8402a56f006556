"""Draft trees as tensors, and `grow_tree`, which builds the trees of a batch with any drafter.

Trees grow level by level: the drafter computes logits for the frontier, every frontier node gets its best children, and
the best of those form the next frontier. At the end the best nodes of all levels are kept. With the `coupled` proposal
"best" means the probability that the target will accept a node, which `Calibration` estimates from the scores.

Shapes: B images, N nodes, W nodes of a frontier, K image codes, V vocabulary indices (`Layout.vocab_size`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.calibration import Calibration
from underdraw.constants import constant
from underdraw.plan import TreePlan, TreeShape
from underdraw.sampling import NoiseWindow, fast_topk

Proposal = Literal["coupled", "topk", "sampled"]
"""How children are chosen: by q with the target's noise, by q alone, or sampled from q without replacement."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees of N nodes. Node 0 is the root, parents come before their children, siblings have different tokens."""

    tokens: Tensor  # (B, N) token ids
    parents: Tensor  # (B, N) index of the parent, -1 at the root
    depths: Tensor  # (B, N) 0 at the root, -1 for padding
    ancestors: Tensor  # (B, N, N) bool: j is i or an ancestor of i
    ranks: Tensor  # (B, N) order among siblings, best first
    branch: int  # most children that a node can have
    q: Tensor | None = None  # (B, N, V) probs that the children of each node were sampled from ("sampled" proposal)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def padded(self, size: int) -> DraftTree:
        """The same trees, padded to at least `size` nodes."""
        missing = size - self.size
        if missing <= 0:
            return self
        diagonal = _identity(size, self.tokens.device)
        return DraftTree(
            functional.pad(self.tokens, (0, missing)),
            functional.pad(self.parents, (0, missing)),
            functional.pad(self.depths, (0, missing), value=-1),
            functional.pad(self.ancestors, (0, missing, 0, missing)) | diagonal,
            functional.pad(self.ranks, (0, missing)),
            self.branch,
            None if self.q is None else functional.pad(self.q, (0, 0, 0, missing)),
        )


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The accepted nodes of every tree, and the token that the target sampled after them."""

    path: Tensor  # (B, D) node indices from the root down; 0 after `length` nodes
    length: Tensor  # (B,) accepted draft tokens
    next_token: Tensor  # (B,) token ids
    chosen: Tensor | None = None  # (B, N) token that the target samples at each node, if computed for all

    def narrow(self, length: int) -> AcceptedPath:
        """The same paths in a smaller tensor, when none is longer than `length`."""
        return replace(self, path=self.path[:, : length + 1])


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """The size limits of each tree of a batch, within the plan that covers them all."""

    depth: Tensor  # (B,)
    width: Tensor  # (B,)
    branch: Tensor  # (B,)
    nodes: Tensor  # (B,)

    @classmethod
    def from_plans(cls, plans: Sequence[TreePlan], device: torch.device) -> TreeLimits:
        rows = [[p.depth, p.width, p.branch, p.nodes] for p in plans]
        return cls(*torch.tensor(rows, device=device).T)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes of one level that the drafter expands next."""

    depth: int
    tokens: Tensor  # (B, W)
    parents: Tensor  # (B, W) index of the parent within the previous frontier


ExpandFn = Callable[[Frontier], Tensor]  # logits (B, W, K) of the children of each node


def grow_tree(
    expand: ExpandFn,
    root: Tensor,
    plan: TreePlan,
    noise_window: NoiseWindow,
    *,
    proposal: Proposal = "coupled",
    calibration: Calibration | None = None,
    limits: TreeLimits | None = None,
) -> DraftTree:
    """Grow trees from the roots (B,) with one plan, each within its `limits`.

    Without a calibration nodes are ranked by q, as in EAGLE-2, whatever the proposal.
    """
    if proposal == "sampled":
        plan = plan.with_fixed_shape()
    if plan.shape is not None:
        return _grow_fixed_shape(expand, root, plan.shape, noise_window, proposal, limits)
    if plan.depth == 0:
        return root_only(root)
    return _grow_best_first(expand, root, plan, noise_window, proposal, calibration, limits)


def root_only(root: Tensor) -> DraftTree:
    """Trees of one node: (B,) token ids."""
    return chain(root[:, None])


def chain(tokens: Tensor, lengths: Tensor | None = None) -> DraftTree:
    """Trees without branches: tokens (B, N) of the root and what follows, of which `lengths` (B,) are drafted."""
    batch, size = tokens.shape
    index, parents, ancestors, ranks = _chain_shape(size, tokens.device)
    depths = index.expand(batch, size)
    if lengths is not None:
        depths = torch.where(depths > lengths[:, None], -1, depths)
    parents, ranks = parents.expand(batch, size), ranks.expand(batch, size)
    return DraftTree(tokens, parents, depths, ancestors.expand(batch, size, size), ranks, branch=1)


@functools.cache  # kept forever: CUDA graphs read these tensors
def _identity(size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(size, dtype=torch.bool, device=device)


@functools.cache  # kept forever: CUDA graphs read these tensors
def _chain_shape(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depths (N,), parents (N,), ancestors (N, N) and ranks (N,) of a chain."""
    with torch.inference_mode(False):
        index = torch.arange(size, device=device)
        return index, index - 1, index[:, None] >= index, torch.zeros_like(index)


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """(B, N) parents of trees of at most `depth` levels -> (B, N, N): j is i or an ancestor of i."""
    batch, size = parents.shape
    is_self = torch.eye(size, dtype=torch.bool, device=parents.device).repeat(batch, 1)  # (B * N, N)
    start = torch.arange(0, batch * size, size, device=parents.device)[:, None]
    parent_row = (parents.clamp(min=0) + start).flatten()
    mask = is_self
    for _ in range(depth):
        mask = is_self | mask.index_select(0, parent_row)
    return mask.view(batch, size, size)


def _propose_children(
    logits: Tensor, depth: int, count: int, noise_window: NoiseWindow, proposal: Proposal
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The best `count` children per node: vocabulary indices and scores (B, W, count), and q if sampled from it."""
    count = min(count, noise_window.sampler.layout.vocab_size)
    if proposal == "coupled":
        scores, indices = fast_topk(noise_window.level_scores(logits, depth), count)
        return indices, scores, None
    filtered = noise_window.level_filtered_logits(logits, depth)
    if proposal == "topk":
        scores, indices = fast_topk(filtered.log_softmax(-1), count)
        return indices, scores, None
    # The largest of log q + Gumbel noise are a sample without replacement; the noise must not be the target's.
    perturbed = filtered if noise_window.noise is None else filtered + noise_window.gumbel("draft")[:, depth - 1, None]
    scores, indices = fast_topk(perturbed, count)
    q = filtered.softmax(-1)
    is_number = q[..., :1] == q[..., :1]  # softmax is NaN everywhere or nowhere; nothing is sampled from NaN
    return indices, scores.where(is_number, -torch.inf), q.where(is_number, 0.0)


@dataclass(frozen=True, slots=True)
class _CandidatePool:
    """Where the P candidates of a best-first growth come from: the root, then level by level, parent by parent."""

    depths: Tensor  # (P,)
    ranks: Tensor  # (P,)
    parents: Tensor  # (P,) index of the parent among the E expanded nodes of all levels; 0 for the root itself
    level_starts: Tensor  # (E,) index of the first candidate of each expanded node's level

    @classmethod
    @functools.cache  # without limit, since CUDA graphs keep reading these tensors
    def build(cls, widths: tuple[int, ...], branch: int, device: torch.device) -> _CandidatePool:
        """`widths` are the numbers of expanded nodes per level."""
        level = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))  # of each expanded node
        root = torch.zeros(1, dtype=torch.int64)
        depths = torch.cat([root, (level + 1).repeat_interleave(branch)])
        ranks = torch.cat([root, torch.arange(branch).repeat(len(level))])
        parents = torch.cat([root, torch.arange(len(level)).repeat_interleave(branch)])
        starts = [0] + [1 + sum(widths[:depth]) * branch for depth in range(len(widths) - 1)]
        level_starts = [start for start, width in zip(starts, widths, strict=True) for _ in range(width)]
        return cls(depths.to(device), ranks.to(device), parents.to(device), torch.tensor(level_starts, device=device))


def _grow_best_first(
    expand: ExpandFn,
    root: Tensor,
    plan: TreePlan,
    noise_window: NoiseWindow,
    proposal: Proposal,
    calibration: Calibration | None,
    limits: TreeLimits | None,
) -> DraftTree:
    """Expand the `width` most probable nodes per level, then keep the `nodes` most probable of all candidates."""
    device, layout = root.device, noise_window.sampler.layout
    branch = min(plan.branch, layout.vocab_size)
    min_log_prob = math.log(plan.min_probability) if plan.min_probability else -math.inf
    frontier = Frontier(0, root[:, None], constant((0,), torch.int64, device).expand(len(root), 1))
    frontier_log_prob: Tensor | None = None  # (B, W, 1) of the path to each frontier node; None: the root, certain
    # Per level: tokens and log-probabilities of the candidates, and which of them were expanded.
    tokens, expanded = [frontier.tokens], [frontier.parents]
    log_probs = [constant((math.inf,), torch.float32, device).expand(len(root), 1)]  # the root is always kept
    widths, num_kept = [1], 1
    excluded = None if limits is None else _exclude_children(limits, plan.depth, plan.width, branch, device)
    for depth in range(1, plan.depth + 1):
        logits = expand(frontier)
        indices, log_prob, _ = _propose_children(logits, depth, branch, noise_window, proposal)  # (B, W, branch)
        if proposal == "coupled" and calibration is not None:
            log_prob = calibration.log_acceptance_probability(log_prob, has_forced_tokens=layout.row_end is not None)
        elif proposal == "coupled":
            log_q = noise_window.level_filtered_logits(logits, depth).log_softmax(-1).gather(-1, indices)
            log_prob = log_q.masked_fill(log_prob == -torch.inf, -torch.inf)  # `fast_topk` gave an arbitrary index
        if frontier_log_prob is not None:
            log_prob = log_prob + frontier_log_prob
        if excluded is not None:
            log_prob = log_prob.masked_fill(excluded[:, depth - 1, : log_prob.shape[1]], -torch.inf)
        tokens.append(layout.token_ids(indices.flatten(1)))
        log_probs.append(log_prob.flatten(1))
        num_candidates = num_probable = widths[-1] * branch
        if plan.min_probability:
            num_probable = int((log_probs[-1] >= min_log_prob).sum(1).max())  # host sync
        num_kept += num_probable
        if depth == plan.depth or not num_probable:
            break
        width = min(num_candidates, plan.width, num_probable)
        best_log_prob, best = fast_topk(log_probs[-1], width)  # (B, width)
        frontier_log_prob = best_log_prob[..., None]
        frontier = Frontier(depth, tokens[-1].gather(1, best), best // branch)
        expanded.append(best)
        widths.append(width)
    pool = _CandidatePool.build(tuple(widths), branch, device)
    joined = (torch.cat(levels, dim=1) for levels in (tokens, log_probs, expanded))
    return _select_nodes(min(plan.nodes, num_kept), len(widths), branch, pool, limits, *joined)


def _exclude_children(limits: TreeLimits, depth: int, width: int, branch: int, device: torch.device) -> Tensor:
    """Children beyond the limits of their tree, by level, parent and rank: (B, depth, width, branch)."""
    index = constant(tuple(range(max(depth, width, branch))), torch.int64, device)
    too_deep = index[:depth, None, None] >= limits.depth[:, None, None, None]
    too_wide = index[:width, None] >= limits.width[:, None, None, None]
    return too_deep | too_wide | (index[:branch] >= limits.branch[:, None, None, None])


def _select_nodes(
    count: int,
    depth: int,
    branch: int,
    pool: _CandidatePool,
    limits: TreeLimits | None,
    tokens: Tensor,
    log_probs: Tensor,
    expanded: Tensor,
) -> DraftTree:
    """Trees of the `count` most probable of the candidates.

    `tokens` and `log_probs` (B, P) belong to the candidates, `expanded` (B, E) are indices of the expanded nodes within
    their levels. The stable sort keeps a parent, which comes first in the pool, before a child of equal probability.
    NaN, from a drafter that is not finite, ranks last: then no candidate below it has another probability than NaN.
    """
    count = min(count, tokens.shape[1])
    log_probs = log_probs.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    log_probs, order = (part[:, :count] for part in log_probs.sort(dim=-1, descending=True, stable=True))
    index = torch.arange(count, device=tokens.device)
    if limits is not None:
        log_probs = log_probs.masked_fill(index >= limits.nodes[:, None], -torch.inf)
    selected, by_index = order.sort(dim=-1)  # (B, count) candidates in pool order, so that parents come first
    is_padding = log_probs.gather(1, by_index) == -torch.inf
    node_of = torch.zeros_like(tokens).scatter_(1, selected, index.expand_as(selected))  # candidate -> tree node
    parent_candidates = (expanded + pool.level_starts).gather(1, torch.take(pool.parents, selected))
    parents = node_of.gather(1, parent_candidates).masked_fill_(is_padding, 0)
    parents[:, 0] = -1
    return DraftTree(
        tokens.gather(1, selected),
        parents,
        torch.take(pool.depths, selected).masked_fill_(is_padding, -1),
        ancestor_mask(parents, depth),
        torch.take(pool.ranks, selected),
        branch,
    )


@dataclass(frozen=True, slots=True)
class _ShapeLevel:
    """One level of a fixed shape; the frontier is the nodes of the level above that have children."""

    branch: int  # most children of a frontier node
    nodes: Tensor  # (n,) nodes of the level
    parents: Tensor  # (n,) their parents
    slots: Tensor  # (n,) index of their parents within the frontier
    ranks: Tensor  # (n,)
    inner: Tensor  # (m,) nodes that have children: the next frontier
    inner_slots: Tensor  # (m,) index of their parents within the frontier


@functools.cache  # without limit, since CUDA graphs keep reading these tensors
def _shape_levels(parents: tuple[int, ...], device: torch.device) -> tuple[_ShapeLevel, ...]:
    shape, frontier, levels = TreeShape.from_parents(parents), [0], []
    for nodes in shape.levels[1:]:
        inner = [n for n in nodes if n in parents]
        slot = {n: frontier.index(parents[n]) for n in nodes}
        ranks = [shape.ranks[n] for n in nodes]
        lists = (list(nodes), [parents[n] for n in nodes], list(slot.values()), ranks, inner, [slot[n] for n in inner])
        tensors = [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]
        levels.append(_ShapeLevel(1 + max(ranks), *tensors))
        frontier = inner
    return tuple(levels)


def _grow_fixed_shape(
    expand: ExpandFn,
    root: Tensor,
    parents: tuple[int, ...],
    noise_window: NoiseWindow,
    proposal: Proposal,
    limits: TreeLimits | None,
) -> DraftTree:
    """Trees of a fixed shape: the drafter chooses the tokens only."""
    batch, device = root.shape[0], root.device
    shape, size, layout = TreeShape.from_parents(parents), len(parents), noise_window.sampler.layout
    tokens = root[:, None].repeat(1, size)
    is_padding = torch.zeros(batch, size, dtype=torch.bool, device=device)
    q = torch.zeros(batch, size, layout.vocab_size, device=device) if proposal == "sampled" else None
    frontier_nodes = torch.zeros(1, dtype=torch.int64, device=device)
    frontier = Frontier(0, root[:, None], frontier_nodes.expand(batch, 1))
    for depth, level in enumerate(_shape_levels(parents, device), start=1):
        indices, scores, frontier_q = _propose_children(expand(frontier), depth, level.branch, noise_window, proposal)
        count = indices.shape[-1]
        source = level.slots * count + level.ranks.clamp(max=count - 1)
        tokens[:, level.nodes] = layout.token_ids(indices).flatten(1)[:, source]
        is_impossible = ~scores.flatten(1)[:, source].isfinite() | (level.ranks >= count)
        is_padding[:, level.nodes] = is_impossible | is_padding[:, level.parents]
        if limits is not None:
            is_padding[:, level.nodes] |= (
                (depth > limits.depth[:, None])
                | (level.ranks >= limits.branch[:, None])
                | (level.slots >= limits.width[:, None])
                | (level.nodes >= limits.nodes[:, None])
            )
        if q is not None and frontier_q is not None:
            q[:, frontier_nodes] = frontier_q
        frontier = Frontier(depth, tokens[:, level.inner], level.inner_slots.expand(batch, -1))
        frontier_nodes = level.inner
    all_parents = constant(parents, torch.int64, device).expand(batch, size)
    return DraftTree(
        tokens,
        torch.where(is_padding, 0, all_parents),
        torch.where(is_padding, -1, constant(shape.depths, torch.int64, device)),
        ancestor_mask(all_parents, len(shape.levels) - 1),
        constant(shape.ranks, torch.int64, device).expand(batch, size),
        max(shape.ranks) + 1,
        q,
    )
