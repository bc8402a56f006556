"""Tree policies for tests of the server: one that takes its time, and one that fails."""

from __future__ import annotations

import time
from dataclasses import dataclass

from underdraw.history import History
from underdraw.plan import TreePlan


@dataclass(frozen=True)
class SlowChain:
    """A chain that leaves time to watch, to press buttons and to go away; images of one seed fail."""

    depth: int = 6
    seconds: float = 0.02
    failing_seed: int = -1

    def plan(self, history: History, step: int) -> TreePlan:
        time.sleep(self.seconds)
        if history.seed == self.failing_seed and history.passes >= 2:
            raise RuntimeError("injected: /a/secret/path")
        return TreePlan(self.depth, 1, 1, self.depth + 1)
