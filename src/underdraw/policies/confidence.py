"""The EAGLE-2 policy: one plan for every pass; the drafter's confidence decides where the tree grows."""

from __future__ import annotations

from dataclasses import dataclass

from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True, slots=True)
class Confidence:
    """`nodes` in total, the root included; the best `top_k` nodes per level are expanded into `top_k` children each."""

    depth: int = 5
    top_k: int = 10
    nodes: int = 59

    def __post_init__(self) -> None:
        TreePlan(self.depth, self.top_k, self.top_k, self.nodes)  # checks the values

    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan(self.depth, self.top_k, self.top_k, self.nodes)
