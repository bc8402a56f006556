"""TreePlan: how large a tree to draft. What policies return, and the key of everything that depends on shapes.

No torch here: policies are plain functions of plain records.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from underdraw.errors import ConfigError

MAX_NODES = 128  # of one tree, the root included: the room that every cache keeps free for it
MAX_EXPANDED = 256  # nodes that a drafter may be asked to expand for one tree
BUCKET_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # nodes that passes of fixed size are padded to


def bucket_size(count: int) -> int:
    """The smallest of SIZES that holds so many nodes."""
    return next(size for size in BUCKET_SIZES if size >= count)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """A tree of at most `nodes` nodes, the root included, that reaches `depth` levels below the root.

    `width` nodes of each level are expanded, each into `branch` children; where that makes fewer than `nodes`, `nodes`
    becomes what it makes. With a `shape` (the parent of every node,
    -1 for the root, siblings in order of rank) the tree is exactly that one, whatever the drafter thinks. With a
    `min_probability`, nodes whose chance of being accepted is smaller are left out, and growth ends when none is left;
    finding that out waits for the device at every level, so it is for CPUs.
    """

    depth: int
    width: int
    branch: int
    nodes: int
    shape: tuple[int, ...] | None = None
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 0 or self.width < 1 or self.branch < 1:
            raise ConfigError(
                f"a tree of depth {self.depth}, width {self.width} and branch {self.branch} cannot be grown; "
                "depth must be at least 0, width and branch at least 1."
            )
        if self.nodes < self.depth + 1:
            raise ConfigError(
                f"{self.nodes} nodes cannot reach depth {self.depth}; use at least {self.depth + 1} or less depth."
            )
        if self.nodes > MAX_NODES:
            raise ConfigError(f"a tree of {self.nodes} nodes is too large; a pass checks at most {MAX_NODES}.")
        if not 0 <= self.min_probability < 1:
            raise ConfigError(f"min_probability {self.min_probability} is a chance and must lie in [0, 1).")
        if self.depth * self.width > MAX_EXPANDED:
            raise ConfigError(
                f"depth {self.depth} times width {self.width} is more than a drafter expands, {MAX_EXPANDED} nodes; "
                "use less of either."
            )
        if self.shape is None:
            object.__setattr__(self, "nodes", min(self.nodes, sum(self._levels())))

    @classmethod
    def of(cls, shape: Sequence[int]) -> TreePlan:
        """The plan of a fixed shape."""
        given = TreeShape.of(tuple(shape))
        parents = _by_level(list(given.parents), list(given.depths))
        known = TreeShape.of(parents)
        width = max((len({parents[n] for n in level}) for level in known.levels[1:]), default=1)
        return cls(len(known.levels) - 1, width, max(known.ranks) + 1, len(parents), parents)

    @property
    def levels(self) -> int:
        """How many levels the drafter is asked for; with a min_probability one more, in which nothing was left."""
        return self.depth + bool(self.min_probability)

    @property
    def expanded(self) -> int:
        """How many nodes the drafter is asked to expand; of a tree with a min_probability at most its own."""
        if self.shape is not None:
            return len(set(self.shape)) - 1
        count = sum(min(count, self.width) for count in self._levels()[:-1])
        return min(max(count, 1), self.nodes) if self.min_probability else count

    def truncate(self, depth: int) -> TreePlan:
        """This plan without the levels below `depth`."""
        if depth >= self.depth:
            return self
        if self.shape is not None:
            depths = TreeShape.of(self.shape).depths
            return TreePlan.of([p for p, d in zip(self.shape, depths, strict=True) if d <= depth])
        return TreePlan(depth, self.width, self.branch, self.nodes, min_probability=self.min_probability)

    def _levels(self) -> list[int]:
        """How many nodes each level may have, from the root's down."""
        counts = [1]
        for _ in range(self.depth):
            counts.append(min(counts[-1], self.width) * self.branch)
        return counts

    def bucketed(self) -> TreePlan:
        """A plan that holds this one, out of few: what captured passes are made for. Depth stays, since levels cost."""
        if self.shape is not None or self.depth == 0:
            return self
        width, branch = (count if count < 3 else -(-count // 4) * 4 for count in (self.width, self.branch))
        width = width if self.depth * width <= MAX_EXPANDED else self.width
        return TreePlan(self.depth, width, branch, bucket_size(self.nodes), min_probability=self.min_probability)

    def with_fixed_shape(self) -> TreePlan:
        """A plan of the same size with a fixed shape, for proposals that may not look before they choose."""
        return (
            self if self.shape is not None else TreePlan.of(_balanced(self.depth, self.width, self.branch, self.nodes))
        )


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What follows from a tuple of parents: the depth of each node, its rank among its siblings, and the levels."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, parents: tuple[int, ...]) -> TreeShape:
        if not parents or parents[0] != -1:
            raise ConfigError("a tree shape starts with its root, whose parent is -1.")
        depths, ranks, seen = [0], [0], dict.fromkeys(range(len(parents)), 0)
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(
                    f"node {node} of the tree shape has parent {parent}; a parent comes before its children."
                )
            depths.append(depths[parent] + 1)
            ranks.append(seen[parent])
            seen[parent] += 1
        levels = tuple(tuple(n for n, d in enumerate(depths) if d == depth) for depth in range(max(depths) + 1))
        return cls(parents, tuple(depths), tuple(ranks), levels)


@functools.lru_cache(maxsize=256)
def _balanced(depth: int, width: int, branch: int, nodes: int) -> tuple[int, ...]:
    """Best-first growth under a guess of how often each rank is accepted: half of what is left, or more of it, so that
    the tree reaches its depth.
    """
    for guess in (0.5, 0.6, 0.7, 0.8, 0.9, 0.99):
        parents, depths = _grown(depth, width, branch, nodes, guess)
        if max(depths) == depth:
            break
    return _by_level(parents, depths)


def _grown(depth: int, width: int, branch: int, nodes: int, guess: float) -> tuple[list[int], list[int]]:
    """Parents and depths of the nodes in order of growth."""
    parents, depths, children = [-1], [0], [0]
    open_levels = [0] * (depth + 1)  # expanded nodes a level
    heap = [(-guess, 0, 0)] if depth else []  # (-chance of the next child, tie-break, parent)
    chances = [1.0]
    while heap and len(parents) < nodes:
        chance, _, parent = heapq.heappop(heap)
        if children[parent] == 0:
            if open_levels[depths[parent]] == width:
                continue
            open_levels[depths[parent]] += 1
        node = len(parents)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        children.append(0)
        chances.append(-chance)
        children[parent] += 1
        if children[parent] < branch:
            chance = chances[parent] * guess * (1 - guess) ** children[parent]
            heapq.heappush(heap, (-chance, node * 2, parent))
        if depths[node] < depth:
            heapq.heappush(heap, (-chances[node] * guess, node * 2 + 1, node))
    return parents, depths


def _by_level(parents: list[int], depths: list[int]) -> tuple[int, ...]:
    """The same tree with its nodes renumbered level by level."""
    order = sorted(range(len(parents)), key=lambda n: (depths[n], n))
    place = {old: new for new, old in enumerate(order)}
    return tuple(-1 if parents[n] < 0 else place[parents[n]] for n in order)
