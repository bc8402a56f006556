"""The adjacency-adaptive policy (ADT-Tree): depth and width follow the acceptance in neighbouring cells.

A tree starts from the depth and width of the tree that produced a neighbouring cell. If at least the share `beta` of
that tree's depth was accepted, the new tree is deeper and narrower, otherwise shallower and wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History, TreeRecord
from underdraw.plan import TreePlan

_OFFSETS: dict[str, tuple[tuple[int, int], ...]] = {
    "horizontal": ((0, -1),),
    "vertical": ((-1, 0),),
    "both": ((0, -1), (-1, 0), (-1, 1)),
    "previous": (),  # only the previous tree, see `Adjacency._neighbours`
}


@dataclass(frozen=True, slots=True)
class Adjacency:
    """`init` chooses the neighbours: left, above, or the average of left, above and above-right.

    `random` and `previous` (the tree of the previous pass, wherever it was) are ablations. A cell without such a
    neighbour starts from the previous tree, the first cell from `depth` and `width`.
    """

    init: Literal["horizontal", "vertical", "both", "random", "previous"] = "horizontal"
    beta: float = 0.5
    l_d: int = 1
    l_k: int = 1
    depth: int = 5
    width: int = 8
    d_min: int = 2
    d_max: int = 10
    k_min: int = 2
    k_max: int = 12
    nodes: int = 59

    def __post_init__(self) -> None:
        if not 0 < self.d_min <= self.depth <= self.d_max:
            raise ConfigError(
                f"adjacency needs 0 < d_min <= depth <= d_max, not {self.d_min}, {self.depth}, {self.d_max}."
            )
        if not 0 < self.k_min <= self.width <= self.k_max:
            raise ConfigError(
                f"adjacency needs 0 < k_min <= width <= k_max, not {self.k_min}, {self.width}, {self.k_max}."
            )
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta {self.beta} is a share of the depth and must lie in [0, 1].")
        if self.l_d < 0 or self.l_k < 0:
            raise ConfigError(f"the increments l_d {self.l_d} and l_k {self.l_k} must not be negative.")
        TreePlan(self.d_max, self.k_max, self.k_max, self.nodes)  # checks the values

    def plan(self, history: History, step: int) -> TreePlan:
        depth, width, acceptance_rate = self._initial_state(history, step)
        sign = 1 if acceptance_rate >= self.beta else -1
        depth = min(max(depth + sign * self.l_d, self.d_min), self.d_max)
        width = min(max(width - sign * self.l_k, self.k_min), self.k_max)
        return TreePlan(depth, width, width, self.nodes)

    def _initial_state(self, history: History, step: int) -> tuple[int, int, float]:
        """Depth, width and acceptance rate that the tree rooted at `step` starts from."""
        if self.init == "random":
            # Keyed by seed and step, so that the policy stays a pure function.
            random = np.random.default_rng((history.seed, step))
            depth = int(random.integers(self.d_min, self.d_max + 1))
            return depth, int(random.integers(self.k_min, self.k_max + 1)), float(random.random())
        records = self._neighbours(history, step)
        if not records:
            return self.depth, self.width, self.beta
        depth = round(sum(r.depth for r in records) / len(records))
        width = round(sum(r.width for r in records) / len(records))
        return depth, width, sum(r.acceptance_rate for r in records) / len(records)

    def _neighbours(self, history: History, step: int) -> list[TreeRecord]:
        """Trees of the neighbouring cells, or the previous tree if there are none."""
        layout, cell = history.layout, history.layout.cell(step)
        candidates = []
        if cell is not None:
            for rows, cols in _OFFSETS[self.init]:
                row, col = cell[0] + rows, cell[1] + cols
                if row >= 0 and 0 <= col < layout.width:
                    candidates.append(history.tree_at(layout.step(row, col)))
        records = [record for record in candidates if record is not None]
        previous = history.tree_at(step)  # the root was produced by the previous pass
        return records or ([previous] if previous is not None else [])
