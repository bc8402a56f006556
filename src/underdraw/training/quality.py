"""How good a drafter is: how often the target's token is among the best few that it drafts, level by level."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from underdraw.calibration import Calibration

BEST = (1, 2, 4, 8)
Table = tuple[tuple[float, ...], ...]
"""By level, the chance that the target's token is among the best 1, 2, 4, 8."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How good a drafter is on pictures that it never saw, under shared noise."""

    loss: float
    sampled: Table  # T = 1
    greedy: Table  # T = 0
    calibration: Calibration

    def __str__(self) -> str:
        def row(table: Table) -> str:
            levels = sorted({0, len(table) // 2, len(table) - 1})
            return ", ".join(f"level {n + 1}: " + "/".join(f"{chance:.3f}" for chance in table[n]) for n in levels)

        return f"loss {self.loss:.4f}; T=1 among 1/2/4/8 {row(self.sampled)}; T=0 {row(self.greedy)}"


def shares(ranks: Tensor) -> Table:
    """ranks (M, D), -1 where nothing was asked -> by level, the share that is among the best 1, 2, 4, 8."""
    rows = []
    for level in ranks.T:
        asked = level[level >= 0]
        rows.append(tuple(round((asked < best).float().mean().item(), 4) for best in BEST))
    return tuple(rows)
