"""Trees as large as they pay on this machine: a node is drafted if its chance is worth its share of a pass.

What a pass costs is a straight line in nodes and levels, measured beforehand. What a token is worth is read off the
neighbourhood in the picture: what it cost there. A node pays if its chance of being accepted times that worth is more
than what checking it costs. Where trees have not paid at all, none is grown for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True, slots=True)
class Cost:
    """`plain` is a pass without a tree, `base` one with a tree, each `node` and `level` on top of it; milliseconds.

    The picture's last `reach` cells and those above the next ones say what a token costs nearby. Where that is more
    than a plain pass, trees are only tried at every `retry`-th step.
    """

    plain: float = 20.0
    base: float = 24.0
    node: float = 0.8
    level: float = 0.5
    depth: int = 12
    width: int = 8
    branch: int = 6
    nodes: int = 48
    reach: int = 6
    retry: int = 12

    def __post_init__(self) -> None:
        for name in ("plain", "base", "node"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"cost:{name}={getattr(self, name)} must be a positive number of milliseconds.")
        if not 0 <= self.level < float("inf"):
            raise ConfigError(f"cost:level={self.level} must be a number of milliseconds, 0 or more.")
        if self.reach < 1 or self.retry < 1:
            raise ConfigError(f"cost:reach={self.reach} and retry={self.retry} must be at least 1.")
        TreePlan(self.depth, self.width, self.branch, self.nodes)

    def plan(self, history: History, step: int) -> TreePlan:
        worth = self._worth(history, step)
        if worth > self.plain and step % self.retry:
            return TreePlan(0, 1, 1, 1)
        min_probability = min(max(self.node / min(worth, self.plain), 0.01), 0.5)
        return TreePlan(self.depth, self.width, self.branch, self.nodes, min_probability=round(min_probability, 3))

    def _worth(self, history: History, step: int) -> float:
        """Milliseconds a token nearby."""
        above = step - history.layout.row_stride + 1
        cells = np.concatenate([np.arange(step - self.reach + 1, step + 1), np.arange(above, above + self.reach)])
        cells = cells[(cells >= 0) & (cells < history.layout.steps)]
        cells = cells[history.pass_index[cells] >= 0]
        if not len(cells):
            return self.plain / 2
        depth = history.depth[cells]
        spent = np.where(depth > 0, self.base + self.node * history.nodes[cells] + self.level * depth, self.plain)
        return float((spent / (history.accepted[cells] + 1)).mean())
