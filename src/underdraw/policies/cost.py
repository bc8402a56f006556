"""The cost policy: draft a node only if its expected gain exceeds the cost of verifying it on this machine.

The cost of a pass is linear in nodes and levels and measured beforehand. The value of a token is what tokens have cost
nearby in the image. A node is worth drafting if its acceptance probability times that value exceeds the cost of a
node. Where trees cost more than plain decoding, they are tried only now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs in milliseconds: `plain` of a pass without a tree, `base` of one with a tree, plus each `node` and `level`.

    The value of a token is averaged over the last `reach` cells and the `reach` cells above the next ones. Where it
    exceeds the cost of a plain pass, a tree is tried only at every `retry`-th step.
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
        TreePlan(self.depth, self.width, self.branch, self.nodes)  # checks the values

    def plan(self, history: History, step: int) -> TreePlan:
        token_value = self._nearby_cost_per_token(history, step)
        if token_value > self.plain and step % self.retry:
            return TreePlan(0, 1, 1, 1)
        min_probability = min(max(self.node / min(token_value, self.plain), 0.01), 0.5)
        return TreePlan(self.depth, self.width, self.branch, self.nodes, min_probability=round(min_probability, 3))

    def _nearby_cost_per_token(self, history: History, step: int) -> float:
        """Milliseconds per token, averaged over the neighbourhood of `step`."""
        above = step - history.layout.row_stride + 1
        steps = np.concatenate([np.arange(step - self.reach + 1, step + 1), np.arange(above, above + self.reach)])
        steps = steps[(steps >= 0) & (steps < history.layout.steps)]
        steps = steps[history.pass_index[steps] >= 0]
        if not len(steps):
            return self.plain / 2  # no data yet: assume that trees save half
        depth = history.depth[steps]
        pass_cost = np.where(depth > 0, self.base + self.node * history.nodes[steps] + self.level * depth, self.plain)
        return float((pass_cost / (history.accepted[steps] + 1)).mean())
