"""Sums over the cells of an image that the policy `budget` reads before every pass, extended pass by pass.

A policy is a function of the history. Summing hundreds of cells anew would take longer than choosing a size by them, so
the sums are kept with the history (`History.memo`) and cost a fraction of a microsecond per new cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from underdraw.history import History
from underdraw.plan import MAX_NODES


class PassTable(NamedTuple):
    """What a pass of every size is worth, by `size_index`: chains by their nodes, then trees by theirs."""

    first: Sequence[float]  # passes per token of a draft of that size where no guess is wrong
    scale: Sequence[float]  # (passes per token - first) * scale is a difficulty
    spent: Sequence[float]  # milliseconds of the pass


def size_index(nodes: int, depth: int) -> int:
    """Entry of a size in a `PassTable`; a chain has one node more than levels."""
    return nodes if nodes <= depth + 1 else nodes + MAX_NODES + 1


class RunningSums:
    """Prefix sums of an image's cells from its first one on; entry n is the sum of the first n cells.

    `drafted` counts cells that a draft filled and `difficulty` adds up theirs. The decayed sums weight a cell by `keep`
    to the power of its distance from the last one. `repeats` counts tokens that equal the one to the left or above.
    """

    def __init__(self, history: History, table: PassTable, plain_ms: float, keep: float) -> None:
        layout = history.layout
        self.start, self.row, self.cells = layout.start, layout.row_stride, 0
        self.table, self.plain_ms, self.keep = table, plain_ms, keep
        self._forced_depth = int(layout.row_end is not None)  # a forced row end is no guess
        self.drafted, self.difficulty, self.repeats = [0], [0.0], [0]
        self.decayed_drafted, self.decayed_difficulty = [0.0], [0.0]
        self.saved_ms = 0.0  # of all drafted passes, against plain decoding of the same cells

    def extend(self, history: History, step: int) -> None:
        """Add the cells up to `step`."""
        first, stop = self.start + self.cells, step + 1
        depths, nodes, accepted = (
            values[first:stop].tolist() for values in (history.depth, history.nodes, history.accepted)
        )
        for depth, count, kept in zip(depths, nodes, accepted, strict=True):
            self._add(depth > self._forced_depth, size_index(count, depth), 1 / (kept + 1))
        self._count_repeats(history.tokens[max(first - self.row, 0) : stop].tolist(), len(depths))
        self.cells += len(depths)

    def _add(self, is_drafted: bool, index: int, passes: float) -> None:
        """Add a cell that took so many passes of the size at `index`."""
        difficulty = 0.0
        if is_drafted:
            difficulty = (passes - self.table.first[index]) * self.table.scale[index]
            self.saved_ms += self.plain_ms - self.table.spent[index] * passes
        self.drafted.append(self.drafted[-1] + is_drafted)
        self.difficulty.append(self.difficulty[-1] + difficulty)
        self.decayed_drafted.append(self.keep * self.decayed_drafted[-1] + is_drafted)
        self.decayed_difficulty.append(self.keep * self.decayed_difficulty[-1] + difficulty)

    def _count_repeats(self, tokens: Sequence[int], new: int) -> None:
        """Count repeats among the last `new` tokens; those before them reach back a row, or to the first token."""
        count, row = self.repeats[-1], self.row
        for cell, place in enumerate(range(len(tokens) - new, len(tokens)), start=self.cells):
            token = tokens[place]
            count += (cell > 0 and token == tokens[place - 1]) or (cell >= row and token == tokens[place - row])
            self.repeats.append(count)

    def repeat_share(self) -> float:
        """Share of the last row's tokens that are repeats; of the first third of a row, as if it were as long."""
        first = max(self.cells - self.row, 1)
        return (self.repeats[-1] - self.repeats[min(first, self.cells)]) / max(self.cells - first, self.row // 3, 1)

    def weighted(self, parts: Sequence[slice]) -> tuple[float, float]:
        """Sums of drafted cells and of their difficulty: decayed, but of equal weight in `parts` (of steps)."""
        drafted, difficulty = self.decayed_drafted[-1], self.decayed_difficulty[-1]
        for part in parts:
            first, last = max(part.start - self.start, 0), min(part.stop - self.start, self.cells)
            low, high = self.keep ** (self.cells - first), self.keep ** (self.cells - last)
            drafted += (self.drafted[last] - self.drafted[first]) / len(parts)
            drafted -= high * self.decayed_drafted[last] - low * self.decayed_drafted[first]
            difficulty += (self.difficulty[last] - self.difficulty[first]) / len(parts)
            difficulty -= high * self.decayed_difficulty[last] - low * self.decayed_difficulty[first]
        return drafted, difficulty
