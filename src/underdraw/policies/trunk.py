"""Trunk length of Jacobi trees: long where much was accepted in the neighbourhood, short where little was.

A tree of `nodes` nodes is a trunk and, with the nodes that are left, branches. Where guesses are good a long trunk
accepts more; where they are bad the nodes are worth more as branches near the root. The accepted length in the row
above predicts which is the case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import TreePlan
from underdraw.policies.running_sums import Parts, accepted_sums

_WIDTH = 2  # has no meaning for Jacobi trees, but a width of 1 would lower the number of nodes of a short tree


@dataclass(frozen=True, slots=True)
class Trunk:
    """`init` names the neighbourhood: the row `above` (from above the next cell to the root), the cells to the `left`,
    half a row `above-right`, `both` of the last two, or the `previous` tree alone; `random` and `fixed` are ablations.

    Under the `linear` rule the trunk has base + slope * (mean accepted length there) nodes. Under the `paper` rule it
    has the mean length of the trunks there, plus `step` and fewer ranks if at least `beta` of them was accepted, minus
    `step` and more ranks otherwise. Lengths are clamped to `shortest` and `longest`. None: a default for `nodes`.
    """

    nodes: int = 64
    init: Literal["above", "left", "above-right", "both", "previous", "random", "fixed"] = "above"
    rule: Literal["linear", "paper"] = "linear"
    base: float | None = None
    slope: float | None = None
    shortest: int | None = None
    longest: int | None = None
    ranks: int = 8
    beta: float = 0.2
    step: int = 4
    _plans: tuple[TreePlan, ...] = field(init=False, repr=False, compare=False)  # from `shortest` to `longest`
    _linear: tuple[float, float] = field(init=False, repr=False, compare=False)  # base and slope, defaults resolved

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ConfigError(f"trunk:nodes={self.nodes} leaves no node to draft; use at least 2.")
        longest = max(1, self.nodes - self.nodes // 16 - 1) if self.longest is None else self.longest
        shortest = min(max(1, self.nodes // 5), longest) if self.shortest is None else self.shortest
        if not 1 <= shortest <= longest < self.nodes:
            raise ConfigError(
                f"trunk needs 1 <= shortest <= longest < nodes, not {shortest}, {longest} and {self.nodes}."
            )
        base = 0.1875 * self.nodes if self.base is None else self.base
        slope = 4.0 * (self.nodes / 64) ** 0.5 if self.slope is None else self.slope
        for name, value in (("base", base), ("slope", slope), ("beta", self.beta)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"trunk:{name}={value} must be a number of at least 0.")
        if self.step < 1 or self.ranks < 1:
            raise ConfigError(f"trunk:step={self.step} and ranks={self.ranks} must be at least 1.")
        TreePlan(longest, _WIDTH, self.ranks, self.nodes)  # checks the values
        plans = tuple(self._plan_of_length(n, shortest, longest) for n in range(shortest, longest + 1))
        object.__setattr__(self, "_linear", (base, slope))
        object.__setattr__(self, "_plans", plans)

    def _plan_of_length(self, length: int, shortest: int, longest: int) -> TreePlan:
        ranks, narrowest = self.ranks, min(self.ranks, 2)
        if self.rule == "paper" and longest > shortest:  # deeper is narrower
            ranks = narrowest + round((ranks - narrowest) * (longest - length) / (longest - shortest))
        return TreePlan(length, _WIDTH, ranks, self.nodes)

    def plan(self, history: History, step: int) -> TreePlan:
        if self.init == "random":  # keyed by seed and step, so that the policy stays a pure function
            return self._plans[np.random.default_rng((history.seed, step)).integers(len(self._plans))]
        if self.init == "fixed":
            return self._nearest_plan(0.625 * self.nodes if self.base is None else self.base)
        sums = accepted_sums(history, step)
        parts = sums.neighbourhood(self.init)
        if self.rule == "paper" and parts:
            return self._nearest_plan(self._paper_length(history, parts))
        return self.plan_by_mean(sums.mean_accepted(parts))

    def plan_by_mean(self, accepted: float | None) -> TreePlan:
        """The plan of the `linear` rule for a mean accepted length nearby; None where no pass filled cells nearby."""
        base, slope = self._linear
        return self._nearest_plan(0.625 * self.nodes if accepted is None else base + slope * accepted)

    def _nearest_plan(self, length: float) -> TreePlan:
        """The plan whose trunk is closest to so many nodes."""
        plans = self._plans
        return plans[min(max(round(length) - plans[0].depth, 0), len(plans) - 1)]

    def _paper_length(self, history: History, parts: Parts) -> float:
        cells = np.concatenate([np.arange(first, last) for first, last in parts]) + history.layout.start
        cells = cells[history.pass_index[cells] >= 0]
        depths = history.depth[cells]
        accepted_share = float((history.accepted[cells] / np.maximum(depths, 1)).mean())
        return float(depths.mean()) + (self.step if accepted_share >= self.beta else -self.step)
