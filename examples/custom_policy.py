"""A tree policy of your own: `python examples/custom_policy.py [MODEL]`.

A policy is a frozen dataclass with one pure function from the history of the image to the size of the next tree. Add it
to the entry point group `underdraw.policy` of your package, and `--tree mine:max_depth=6` works on the command line.
"""

import sys
from dataclasses import dataclass

from underdraw import Pipeline
from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True)
class OneDeeper:
    """One level deeper than the accepted length of the previous pass."""

    max_depth: int = 8
    width: int = 2

    def plan(self, history: History, step: int) -> TreePlan:
        previous = history.tree_at(step)  # the tree that produced the root
        depth = min(self.max_depth, 1 + (previous.accepted if previous else 0))
        return TreePlan(depth, self.width, branch=2, nodes=1 + 2 * depth)


pipe = Pipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny")
pipe.tree = OneDeeper(max_depth=6)
out = pipe("a fox, 3D render, on a sky blue background", seed=2)
print(f"{pipe.tree_name}: {out.stats.tokens_per_pass:.2f} tokens per pass, mean depth {out.stats.mean_depth:.2f}")
assert out.images[0].tobytes() == pipe.plain()("a fox, 3D render, on a sky blue background", seed=2).images[0].tobytes()
