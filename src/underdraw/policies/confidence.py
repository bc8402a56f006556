"""The EAGLE-2 tree: one size everywhere, grown where the drafter is confident."""

from __future__ import annotations

from dataclasses import dataclass

from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True, slots=True)
class Confidence:
    """`nodes` in all, the root included; `top_k` nodes a level are expanded into `top_k` children each."""

    depth: int = 5
    top_k: int = 10
    nodes: int = 59

    def __post_init__(self) -> None:
        TreePlan(self.depth, self.top_k, self.top_k, self.nodes)

    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan(self.depth, self.top_k, self.top_k, self.nodes)
