"""Draft trees as tensors, and `grow_tree()`: the one way to build B of them at once from any drafter.

A tree is grown level by level: the drafter gives the logits of the nodes to be expanded, each node gets its best
children, the most promising children are expanded next, and at the end the best nodes of all levels are kept. What
is best under the `coupled` proposal is the chance that the target will choose a node, which `Calibration` estimates
from how far its score lies behind the best one; q alone does not tell it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.calibration import Calibration
from underdraw.constants import constant
from underdraw.errors import ConfigError
from underdraw.plan import TreePlan, TreeShape
from underdraw.sampling import NoiseWindow, best

Proposal = Literal["coupled", "topk", "sampled"]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees of N nodes. Node 0 is the root, a parent comes before its children, siblings hold different tokens."""

    tokens: Tensor  # (B, N) token ids
    parents: Tensor  # (B, N) index of the parent, -1 at the root
    depths: Tensor  # (B, N) 0 at the root, -1 for padding
    ancestors: Tensor  # (B, N, N) bool: j is i or an ancestor of i
    ranks: Tensor  # (B, N) order among the siblings, best first
    branch: int  # children that a node has at most
    q: Tensor | None = None  # (B, N, columns) what the children of each node were drawn from, if a verifier needs it

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def padded(self, size: int) -> DraftTree:
        """The same trees with padding behind their nodes; trees that are as large stay what they are."""
        more = size - self.size
        if more <= 0:
            return self
        own = torch.eye(size, dtype=torch.bool, device=self.tokens.device)
        return DraftTree(
            functional.pad(self.tokens, (0, more)),
            functional.pad(self.parents, (0, more)),
            functional.pad(self.depths, (0, more), value=-1),
            functional.pad(self.ancestors, (0, more, 0, more)) | own,
            functional.pad(self.ranks, (0, more)),
            self.branch,
            None if self.q is None else functional.pad(self.q, (0, 0, 0, more)),
        )


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """The path that the target agrees with, and the token it chose after it."""

    path: Tensor  # (B, D) node indices from the root down; entries past `length` are 0
    length: Tensor  # (B,) drafted nodes on the path
    next_token: Tensor  # (B,) token ids
    chosen: Tensor | None = None  # (B, N) what the target would draw at each node, if all were looked at

    def narrow(self, length: int) -> AcceptedPath:
        """The same verdict when no path is longer than `length`."""
        return replace(self, path=self.path[:, : length + 1])


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """How far each of B trees may grow inside the plan that they share."""

    depth: Tensor  # (B,)
    width: Tensor  # (B,)
    branch: Tensor  # (B,)
    nodes: Tensor  # (B,)

    @classmethod
    def of(cls, plans: list[TreePlan], device: torch.device) -> TreeLimits:
        rows = [[p.depth, p.width, p.branch, p.nodes] for p in plans]
        return cls(*torch.tensor(rows, device=device).T)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes that a drafter is asked to expand: their tokens, and their parents as places in the level before."""

    depth: int
    tokens: Tensor  # (B, W)
    parents: Tensor  # (B, W)


ExpandFn = Callable[[Frontier], Tensor]  # logits (B, W, K) of the children of each node


def covering_plan(plans: list[TreePlan]) -> TreePlan:
    """The smallest plan that holds every one of the plans of a batch."""
    first = plans[0]
    if all(plan == first for plan in plans):
        return first
    if any(plan.shape is not None for plan in plans):
        largest = max(plans, key=lambda plan: plan.nodes)
        if any(plan != largest.truncate(plan.depth) for plan in plans):
            raise ConfigError(
                "the images of one batch must share one tree shape; use a policy without shapes or batch size 1."
            )
        return largest
    return TreePlan(
        max(p.depth for p in plans),
        max(p.width for p in plans),
        max(p.branch for p in plans),
        max(p.nodes for p in plans),
        min_probability=min((p.min_probability for p in plans if p.depth), default=0.0),
    )


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
    """B trees from their roots (B,), drafted as `plan` says; `limits` holds what each of them may use of it.

    Without a calibration, nodes are ranked by q as in EAGLE-2, whatever the proposal.
    """
    if proposal == "sampled":
        plan = plan.with_fixed_shape()
    if plan.shape is not None:
        return _grow_shape(expand, root, plan.shape, noise_window, proposal, limits)
    if plan.depth == 0:
        return root_only(root)
    return _grow_best(expand, root, plan, noise_window, proposal, calibration, limits)


def children(
    logits: Tensor, depth: int, count: int, noise_window: NoiseWindow, proposal: Proposal
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The best `count` children of each node: columns and scores (B, W, count), and q if they were drawn from it."""
    count = min(count, noise_window.sampler.layout.vocab_size)
    if proposal == "coupled":
        scores, columns = best(noise_window.level_scores(logits, depth), count)
        return columns, scores, None
    scaled = noise_window.level_scaled(logits, depth)
    if proposal == "topk":
        scores, columns = best(scaled.log_softmax(-1), count)
        return columns, scores, None
    # Sorting log q + Gumbel noise is drawing without replacement; the noise must not be the target's.
    perturbed = scaled if noise_window.noise is None else scaled + noise_window.gumbel("draft")[:, depth - 1, None]
    scores, columns = best(perturbed, count)
    return columns, scores, scaled.softmax(-1)


def root_only(root: Tensor) -> DraftTree:
    return chain(root[:, None])


def chain(tokens: Tensor, lengths: Tensor | None = None) -> DraftTree:
    """Trees without branches: the root and the tokens after it (B, N); each keeps `lengths` (B,) of them."""
    batch, size = tokens.shape
    index = torch.arange(size, device=tokens.device)
    depths = index.expand(batch, size)
    if lengths is not None:
        depths = torch.where(depths > lengths[:, None], -1, depths)
    return DraftTree(
        tokens,
        (index - 1).expand(batch, size),
        depths,
        (index[:, None] >= index).expand(batch, size, size),
        torch.zeros_like(tokens),
        branch=1,
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """All nodes that a best-first growth looks at: the root, then level by level, each level parent by parent."""

    depths: Tensor  # (P,)
    ranks: Tensor  # (P,)
    parents: Tensor  # (P,) which expanded node is the parent, counted over all levels; the root is its own
    starts: Tensor  # (E,) where the level of each expanded node begins in the pool

    @classmethod
    @functools.cache  # never forgotten, since captured passes read these tensors
    def of(cls, widths: tuple[int, ...], branch: int, device: torch.device) -> _Pool:
        level = torch.repeat_interleave(torch.arange(len(widths)), torch.tensor(widths))  # of each expanded node
        root = torch.zeros(1, dtype=torch.int64)
        depths = torch.cat([root, (level + 1).repeat_interleave(branch)])
        ranks = torch.cat([root, torch.arange(branch).repeat(len(level))])
        parents = torch.cat([root, torch.arange(len(level)).repeat_interleave(branch)])
        begins = [0] + [1 + sum(widths[:depth]) * branch for depth in range(len(widths) - 1)]  # of the levels
        starts = [begin for begin, width in zip(begins, widths, strict=True) for _ in range(width)]
        return cls(depths.to(device), ranks.to(device), parents.to(device), torch.tensor(starts, device=device))


def _grow_best(
    expand: ExpandFn,
    root: Tensor,
    plan: TreePlan,
    noise_window: NoiseWindow,
    proposal: Proposal,
    calibration: Calibration | None,
    limits: TreeLimits | None,
) -> DraftTree:
    """Expand the most promising `width` nodes a level, then keep the best `nodes` of all that were seen."""
    device, layout = root.device, noise_window.sampler.layout
    branch = min(plan.branch, layout.vocab_size)
    lowest = math.log(plan.min_probability) if plan.min_probability else -math.inf
    level = Frontier(0, root[:, None], constant((0,), torch.int64, device).expand(len(root), 1))
    reached: Tensor | None = None  # (B, W, 1) log chance that the target comes by the nodes of the level
    tokens, places = [level.tokens], [level.parents]  # of all nodes, and of the expanded ones in their levels
    chances = [constant((math.inf,), torch.float32, device).expand(len(root), 1)]  # the root is always kept
    widths, nodes = [1], 1  # expanded nodes a level, and nodes worth keeping
    closed = None if limits is None else _closed(limits, plan.depth, plan.width, branch, device)
    for depth in range(1, plan.depth + 1):
        logits = expand(level)
        column, chance, _ = children(logits, depth, branch, noise_window, proposal)  # (B, W, k)
        if proposal == "coupled" and calibration is not None:
            chance = calibration.log_chance(chance, forcing=layout.row_end is not None)
        elif proposal == "coupled":
            likely = noise_window.level_scaled(logits, depth).log_softmax(-1).gather(-1, column)
            chance = likely.masked_fill(chance == -torch.inf, -torch.inf)  # where the column means nothing
        if reached is not None:
            chance = chance + reached
        if closed is not None:
            chance = chance.masked_fill(closed[:, depth - 1, : chance.shape[1]], -torch.inf)
        tokens.append(layout.token_ids(column.flatten(1)))
        chances.append(chance.flatten(1))
        count = alive = widths[-1] * branch
        if plan.min_probability:
            alive = int((chances[-1] >= lowest).sum(1).max())
        nodes += alive
        if depth == plan.depth or not alive:
            break
        count = min(count, plan.width, alive)
        top, best_of = best(chances[-1], count)  # (B, W'); where the chance is none, the place may be anybody's
        reached = top[..., None]
        level = Frontier(depth, tokens[-1].gather(1, best_of), best_of // branch)
        places.append(best_of)
        widths.append(count)
    pool = _Pool.of(tuple(widths), branch, device)
    joined = (torch.cat(parts, dim=1) for parts in (tokens, chances, places))
    return _keep(min(plan.nodes, nodes), len(widths), branch, pool, limits, *joined)


def _closed(limits: TreeLimits, depth: int, width: int, branch: int, device: torch.device) -> Tensor:
    """Which children each tree must do without, by level, parent and rank: (B, depth, width, branch).

    Those that are too deep, those of too late a parent, and those of too high a rank.
    """
    order = constant(tuple(range(max(depth, width, branch))), torch.int64, device)
    deep = order[:depth, None, None] >= limits.depth[:, None, None, None]
    late = order[:width, None] >= limits.width[:, None, None, None]
    return deep | late | (order[:branch] >= limits.branch[:, None, None, None])


def _keep(
    count: int, depth: int, branch: int, pool: _Pool, limits: TreeLimits | None, tokens: Tensor, chance: Tensor,
    places: Tensor,
) -> DraftTree:  # fmt: skip
    """The best nodes of a pool of tokens (B, P) as a tree; places (B, E) in their levels of those that were expanded.

    A stable sort keeps a parent, which comes first in the pool, before a child of equal chance.
    """
    count = min(count, tokens.shape[1])
    chance, order = (part[:, :count] for part in chance.sort(dim=-1, descending=True, stable=True))
    index = torch.arange(count, device=tokens.device)
    if limits is not None:
        chance = chance.masked_fill(index >= limits.nodes[:, None], -torch.inf)
    kept, by_place = order.sort(dim=-1)  # (B, count) pool places in the order of growth
    padding = chance.gather(1, by_place) == -torch.inf
    new_place = torch.zeros_like(tokens).scatter_(1, kept, index.expand_as(kept))
    above = (places + pool.starts).gather(1, torch.take(pool.parents, kept))
    parents = new_place.gather(1, above).masked_fill_(padding, 0)
    parents[:, 0] = -1
    return DraftTree(
        tokens.gather(1, kept),
        parents,
        torch.take(pool.depths, kept).masked_fill_(padding, -1),
        ancestor_mask(parents, depth),
        torch.take(pool.ranks, kept),
        branch,
    )


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """(B, N) parents of trees of at most `depth` levels -> (B, N, N): j is i or an ancestor of i."""
    batch, size = parents.shape
    own = torch.eye(size, dtype=torch.bool, device=parents.device).repeat(batch, 1)  # (B * N, N)
    start = torch.arange(0, batch * size, size, device=parents.device)[:, None]
    up = (parents.clamp(min=0) + start).flatten()
    above = own
    for _ in range(depth):
        above = own | above.index_select(0, up)
    return above.view(batch, size, size)


@dataclass(frozen=True, slots=True)
class _ShapeLevel:
    """Where the nodes of one level of a fixed shape stand; the frontier is the nodes above that have children."""

    branch: int  # children that the frontier's nodes are asked for
    nodes: Tensor  # (n,) the level's nodes
    parents: Tensor  # (n,) their parents
    slots: Tensor  # (n,) their parents' places in the frontier
    ranks: Tensor  # (n,)
    inner: Tensor  # (m,) those of the nodes that have children: the next frontier
    inner_slots: Tensor  # (m,) their parents' places in this frontier


@functools.cache  # never forgotten, since captured passes read these tensors
def _shape_levels(parents: tuple[int, ...], device: torch.device) -> tuple[_ShapeLevel, ...]:
    shape, frontier, levels = TreeShape.of(parents), [0], []
    for nodes in shape.levels[1:]:
        inner = [n for n in nodes if n in parents]
        slot = {n: frontier.index(parents[n]) for n in nodes}
        ranks = [shape.ranks[n] for n in nodes]
        lists = (list(nodes), [parents[n] for n in nodes], list(slot.values()), ranks, inner, [slot[n] for n in inner])
        tensors = [torch.tensor(values, dtype=torch.int64, device=device) for values in lists]
        levels.append(_ShapeLevel(1 + max(ranks), *tensors))
        frontier = inner
    return tuple(levels)


def _grow_shape(
    expand: ExpandFn,
    root: Tensor,
    parents: tuple[int, ...],
    noise_window: NoiseWindow,
    proposal: Proposal,
    limits: TreeLimits | None,
) -> DraftTree:
    """The children that a fixed shape asks for; the drafter chooses their tokens and nothing else."""
    batch, device = root.shape[0], root.device
    shape, size = TreeShape.of(parents), len(parents)
    tokens = root[:, None].repeat(1, size)
    dead = torch.zeros(batch, size, dtype=torch.bool, device=device)
    q = (
        torch.zeros(batch, size, noise_window.sampler.layout.vocab_size, device=device)
        if proposal == "sampled"
        else None
    )
    frontier = torch.zeros(1, dtype=torch.int64, device=device)
    level = Frontier(0, root[:, None], frontier.expand(batch, 1))
    for depth, place in enumerate(_shape_levels(parents, device), start=1):
        columns, scores, rows = children(expand(level), depth, place.branch, noise_window, proposal)
        count = columns.shape[-1]
        source = place.slots * count + place.ranks.clamp(max=count - 1)
        tokens[:, place.nodes] = noise_window.sampler.layout.token_ids(columns).flatten(1)[:, source]
        impossible = scores.flatten(1)[:, source].isinf() | (place.ranks >= count)
        dead[:, place.nodes] = impossible | dead[:, place.parents]
        if limits is not None:
            dead[:, place.nodes] |= (
                (depth > limits.depth[:, None])
                | (place.ranks >= limits.branch[:, None])
                | (place.slots >= limits.width[:, None])
                | (place.nodes >= limits.nodes[:, None])
            )
        if q is not None and rows is not None:
            q[:, frontier] = rows
        level = Frontier(depth, tokens[:, place.inner], place.inner_slots.expand(batch, -1))
        frontier = place.inner
    up = constant(parents, torch.int64, device).expand(batch, size)
    return DraftTree(
        tokens,
        torch.where(dead, 0, up),
        torch.where(dead, -1, constant(shape.depths, torch.int64, device)),
        ancestor_mask(up, len(shape.levels) - 1),
        constant(shape.ranks, torch.int64, device).expand(batch, size),
        max(shape.ranks) + 1,
        q,
    )
