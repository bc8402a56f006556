"""TreePlan: the size or shape of the tree to draft. Policies return plans, CUDA graphs and caches are keyed by them.

No torch: policies are plain functions of plain records.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from underdraw.errors import ConfigError

MAX_NODES = 128  # of one tree, the root included: every KV cache keeps this many slots free
MAX_DEPTH = MAX_NODES - 1  # of a tree
MAX_GPU_DEPTH = 63  # the same with row-invariant numerics on a GPU: keys that `kernels.tree_attention` sums one by one
MAX_EXPANDED = 256  # nodes of one tree that a drafter expands
BUCKET_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # tree sizes that captured passes are padded to


def bucket_size(nodes: int) -> int:
    """The smallest of `BUCKET_SIZES` that holds so many nodes."""
    return next(size for size in BUCKET_SIZES if size >= nodes)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """A tree of at most `nodes` nodes, the root included, with `depth` levels below the root.

    Per level, the best `width` nodes are expanded into `branch` children each. With a `shape` (the parent of every
    node, -1 for the root, siblings in order of rank) the tree has exactly this shape, whatever the drafter's scores.
    With a `min_probability`, nodes with a smaller acceptance probability are dropped and growth stops when none is
    left; this check synchronises host and device at every level, so it is meant for CPUs.
    """

    depth: int
    width: int
    branch: int
    nodes: int  # lowered to what the levels can hold
    shape: tuple[int, ...] | None = None
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 0 or self.width < 1 or self.branch < 1:
            raise ConfigError(
                f"a tree of depth {self.depth}, width {self.width} and branch {self.branch} is impossible; "
                "depth must be at least 0, width and branch at least 1."
            )
        if self.nodes < self.depth + 1:
            raise ConfigError(
                f"{self.nodes} nodes cannot reach depth {self.depth}; use at least {self.depth + 1} or less depth."
            )
        if self.nodes > MAX_NODES:
            raise ConfigError(f"a tree of {self.nodes} nodes is too large; a pass verifies at most {MAX_NODES}.")
        if not 0 <= self.min_probability < 1:
            raise ConfigError(f"min_probability {self.min_probability} must lie in [0, 1).")
        if self.depth * self.width > MAX_EXPANDED:
            raise ConfigError(
                f"depth {self.depth} times width {self.width} exceeds the {MAX_EXPANDED} nodes that a drafter expands; "
                "use less of either."
            )
        if self.shape is None:
            object.__setattr__(self, "nodes", min(self.nodes, _max_nodes(self.depth, self.width, self.branch)))

    @classmethod
    def from_shape(cls, parents: Sequence[int]) -> TreePlan:
        """The plan of a fixed shape; its nodes are renumbered level by level."""
        unordered = TreeShape.from_parents(tuple(parents))
        parents = _renumber_by_level(list(unordered.parents), list(unordered.depths))
        shape = TreeShape.from_parents(parents)
        width = max((len({parents[n] for n in level}) for level in shape.levels[1:]), default=1)
        return cls(len(shape.levels) - 1, width, max(shape.ranks) + 1, len(parents), parents)

    @property
    def levels(self) -> int:
        """Number of levels that the drafter computes; with a `min_probability` the last one turns out empty."""
        return self.depth + bool(self.min_probability)

    @property
    def expanded(self) -> int:
        """Number of nodes that the drafter expands; with a `min_probability` an upper bound."""
        if self.shape is not None:
            return len(set(self.shape)) - 1
        count = sum(min(size, self.width) for size in _level_sizes(self.depth, self.width, self.branch)[:-1])
        return min(max(count, 1), self.nodes) if self.min_probability else count

    def truncate(self, depth: int) -> TreePlan:
        """This plan without the levels below `depth`."""
        if depth >= self.depth:
            return self
        if self.shape is not None:
            depths = TreeShape.from_parents(self.shape).depths
            return TreePlan.from_shape([p for p, d in zip(self.shape, depths, strict=True) if d <= depth])
        return TreePlan(depth, self.width, self.branch, self.nodes, min_probability=self.min_probability)

    def bucketed(self, *, is_depth_free: bool = False) -> TreePlan:
        """A plan at least as large, one of few: CUDA graphs are captured for these.

        The depth stays, since levels cost, unless it `is_depth_free`: then it becomes one less than a bucket size.
        """
        if self.shape is not None or self.depth == 0:
            return self
        depth = bucket_size(self.depth + 1) - 1 if is_depth_free else self.depth
        width, branch = (count if count < 3 else -(-count // 4) * 4 for count in (self.width, self.branch))
        if depth * width > MAX_EXPANDED:
            width = min(self.width, MAX_EXPANDED // depth)
        return TreePlan(depth, width, branch, bucket_size(self.nodes), min_probability=self.min_probability)

    def with_fixed_shape(self) -> TreePlan:
        """A plan of the same size with a fixed shape, for proposals whose shape must not depend on drafted tokens."""
        if self.shape is not None:
            return self
        return TreePlan.from_shape(_balanced_shape(self.depth, self.width, self.branch, self.nodes))


def _level_sizes(depth: int, width: int, branch: int) -> list[int]:
    """The most nodes that each level can have, from the root's down."""
    sizes = [1]
    for _ in range(depth):
        sizes.append(min(sizes[-1], width) * branch)
    return sizes


@functools.lru_cache(maxsize=4096)  # plans are made for every image of every pass
def _max_nodes(depth: int, width: int, branch: int) -> int:
    return sum(_level_sizes(depth, width, branch))


@functools.lru_cache(maxsize=MAX_NODES)
def chain_plan(depth: int) -> TreePlan:
    """The plan of a tree without branches."""
    return TreePlan(depth, 1, 1, depth + 1)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree as the parent of every node, with the depths, ranks and levels that follow from it."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]  # order among siblings
    levels: tuple[tuple[int, ...], ...]  # nodes of each depth

    @classmethod
    @functools.lru_cache(maxsize=256)
    def from_parents(cls, parents: tuple[int, ...]) -> TreeShape:
        if not parents or parents[0] != -1:
            raise ConfigError("a tree shape starts with its root, whose parent is -1.")
        depths, ranks, num_children = [0], [0], [0] * len(parents)
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(
                    f"node {node} of the tree shape has parent {parent}; a parent comes before its children."
                )
            depths.append(depths[parent] + 1)
            ranks.append(num_children[parent])
            num_children[parent] += 1
        levels = tuple(tuple(n for n, d in enumerate(depths) if d == depth) for depth in range(max(depths) + 1))
        return cls(parents, tuple(depths), tuple(ranks), levels)


def covering_plan(plans: Sequence[TreePlan]) -> TreePlan:
    """The smallest plan that holds the plans of all images of a batch."""
    first = plans[0]
    if all(plan is first or plan == first for plan in plans):
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


@functools.lru_cache(maxsize=256)
def _balanced_shape(depth: int, width: int, branch: int, nodes: int) -> tuple[int, ...]:
    """The best shape if every child were accepted with the same probability, given that its elder siblings were not.

    The probability is 0.5, or the smallest larger one with which the tree reaches its depth.
    """
    for probability in (0.5, 0.6, 0.7, 0.8, 0.9, 0.99):
        parents, depths = _grow_best_first(depth, width, branch, nodes, probability)
        if max(depths) == depth:
            break
    return _renumber_by_level(parents, depths)


def _grow_best_first(
    depth: int, width: int, branch: int, nodes: int, probability: float
) -> tuple[list[int], list[int]]:
    """Parents and depths of the nodes, most probable first."""
    parents, depths, num_children = [-1], [0], [0]
    path_probability = [1.0]
    num_expanded = [0] * (depth + 1)  # nodes with children in each level
    candidates = [(-probability, 0, 0)] if depth else []  # (-path probability of the next child, tie-break, parent)
    while candidates and len(parents) < nodes:
        negative, _, parent = heapq.heappop(candidates)
        if num_children[parent] == 0:
            if num_expanded[depths[parent]] == width:
                continue
            num_expanded[depths[parent]] += 1
        node = len(parents)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        num_children.append(0)
        path_probability.append(-negative)
        num_children[parent] += 1
        if num_children[parent] < branch:
            sibling = path_probability[parent] * probability * (1 - probability) ** num_children[parent]
            heapq.heappush(candidates, (-sibling, node * 2, parent))
        if depths[node] < depth:
            heapq.heappush(candidates, (-path_probability[node] * probability, node * 2 + 1, node))
    return parents, depths


def _renumber_by_level(parents: list[int], depths: list[int]) -> tuple[int, ...]:
    """Parents of the same tree with its nodes in level order."""
    order = sorted(range(len(parents)), key=lambda n: (depths[n], n))
    new_index = {old: new for new, old in enumerate(order)}
    return tuple(-1 if parents[n] < 0 else new_index[parents[n]] for n in order)
