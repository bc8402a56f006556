"""A tree policy of your own: `python examples/custom_policy.py [MODEL]`.

A policy is a frozen dataclass with one pure function from what has happened so far to the size of the next tree. Put it
under the entry point group `underdraw.policy` of your package, and `--tree mine:most=6` works on the command line.
"""

import sys
from dataclasses import dataclass

from underdraw import Pipeline
from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True)
class AsBefore:
    """One level deeper than what was accepted in the pass before this one."""

    most: int = 8
    width: int = 2

    def plan(self, history: History, step: int) -> TreePlan:
        before = history.tree_at(step)  # the tree that produced the root
        depth = min(self.most, 1 + (before.accepted if before else 0))
        return TreePlan(depth, self.width, branch=2, nodes=1 + 2 * depth)


pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
pipe.tree = AsBefore(most=6)
out = pipe("a red fox on a blue background", seed=7)
print(f"{pipe.tree_name}: {out.stats.tokens_per_pass:.2f} tokens per pass, mean depth {out.stats.mean_depth:.2f}")
assert out.images[0].tobytes() == pipe.plain()("a red fox on a blue background", seed=7).images[0].tobytes()
