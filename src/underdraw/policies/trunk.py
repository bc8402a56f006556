"""Trunk length of Jacobi trees: long where much was accepted in the neighbourhood, short where little was.

A tree of `nodes` nodes is a trunk and, with the nodes that are left, branches. Where guesses are good a long trunk
accepts more; where they are bad the nodes are worth more as branches near the root. The accepted length in the row
above predicts which is the case.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import TreePlan

_LEFT = 12  # cells to the left that count
_tree_plan = functools.lru_cache(maxsize=1024)(TreePlan)  # checking a plan takes longer than looking it up
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

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ConfigError(f"trunk:nodes={self.nodes} leaves no node to draft; use at least 2.")
        shortest, longest = self._bounds()
        if not 1 <= shortest <= longest < self.nodes:
            raise ConfigError(
                f"trunk needs 1 <= shortest <= longest < nodes, not {shortest}, {longest} and {self.nodes}."
            )
        for name, value in (("base", self._base()), ("slope", self._slope()), ("beta", self.beta)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"trunk:{name}={value} must be a number of at least 0.")
        if self.step < 1 or self.ranks < 1:
            raise ConfigError(f"trunk:step={self.step} and ranks={self.ranks} must be at least 1.")
        TreePlan(longest, _WIDTH, self.ranks, self.nodes)

    def plan(self, history: History, step: int) -> TreePlan:
        shortest, longest = self._bounds()
        length = min(max(round(self._length(history, step)), shortest), longest)
        ranks, narrowest = self.ranks, min(self.ranks, 2)
        if self.rule == "paper" and longest > shortest:  # deeper is narrower
            ranks = narrowest + round((ranks - narrowest) * (longest - length) / (longest - shortest))
        return _tree_plan(length, _WIDTH, ranks, self.nodes)

    def _length(self, history: History, step: int) -> float:
        """The length of the trunk before clamping."""
        if self.init == "random":  # keyed by seed and step, so that the policy stays a pure function
            shortest, longest = self._bounds()
            return float(np.random.default_rng((history.seed, step)).integers(shortest, longest + 1))
        parts = neighbourhood(history, step, self.init)
        if self.init == "fixed" or not parts:
            return self.base if self.init == "fixed" and self.base is not None else 0.625 * self.nodes
        if self.rule == "linear":
            accepted = sum(mean_accepted(history, part) for part in parts) / len(parts)
            return self._base() + self._slope() * accepted
        cells = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        cells = cells[history.pass_index[cells] >= 0]
        depths = history.depth[cells]
        accepted_share = float((history.accepted[cells] / np.maximum(depths, 1)).mean())
        return float(depths.mean()) + (self.step if accepted_share >= self.beta else -self.step)

    def _base(self) -> float:
        return 0.1875 * self.nodes if self.base is None else self.base

    def _slope(self) -> float:
        return 4.0 * (self.nodes / 64) ** 0.5 if self.slope is None else self.slope

    def _bounds(self) -> tuple[int, int]:
        """The shortest and the longest trunk."""
        longest = max(1, self.nodes - self.nodes // 16 - 1) if self.longest is None else self.longest
        return min(max(1, self.nodes // 5), longest) if self.shortest is None else self.shortest, longest


def mean_accepted(history: History, part: slice) -> float:
    """Mean accepted length of the passes that filled cells of a part, which has some."""
    return int(history.accepted[part].sum()) / np.count_nonzero(history.pass_index[part] >= 0)


def neighbourhood(history: History, step: int, init: str) -> list[slice]:
    """Steps near the next cell, in parts of equal weight that have cells of passes; `step` is the root's."""
    stride, stop = history.layout.row_stride, step + 1
    half, left = stop - stride + max(stride // 2, 1), stop - min(_LEFT, stride)
    named = {
        "above": ((stop - stride, stop),),
        "left": ((left, stop),),
        "above-right": ((stop - stride, half),),
        "both": ((stop - stride, half), (left, stop)),
    }
    parts = [slice(max(first, 0), max(last, 0)) for first, last in named.get(init, ((step, stop),))]
    return [part for part in parts if (history.pass_index[part] >= 0).any()]
