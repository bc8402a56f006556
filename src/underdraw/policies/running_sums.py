"""Sums over the cells of an image that policies read before every pass, extended pass by pass.

A policy is a function of the history. Summing hundreds of cells anew would take longer than choosing a size by them, so
the sums are kept with the history (`History.memo`) as plain numbers and cost a fraction of a microsecond per new cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from underdraw.history import History
from underdraw.plan import MAX_NODES

LEFT = 12  # cells to the left that count as near
RETRY_ROWS = 2  # after so many rows of cells, a picture where drafting has not paid is judged anew
_MEMO = "accepted"  # key in `History.memo`
Parts = Sequence[tuple[int, int]]  # ranges of cells, counted from the image's first one


class AcceptedSums:
    """Prefix sums of an image's cells from its first one on; entry n of `sums` is about the first n cells.

    An entry holds the number of cells that a pass filled, and the sum of the accepted lengths of their passes.
    """

    def __init__(self, history: History) -> None:
        self.start, self.row, self.cells = history.layout.start, history.layout.row_stride, 0
        self.sums: list[tuple[float, ...]] = [(0, 0)]

    def extend(self, history: History, step: int) -> None:
        """Add the cells up to `step`."""
        new = slice(self.start + self.cells, step + 1)
        passes, accepted = self.sums[-1]
        for number, length in zip(history.pass_index[new].tolist(), history.accepted[new].tolist(), strict=True):
            passes, accepted = passes + (number >= 0), accepted + length
            self.sums.append((passes, accepted))
        self.cells = len(self.sums) - 1

    def neighbourhood(self, init: str) -> Parts:
        """Cells near the next one, in parts of equal weight that have cells of passes; `init` as in `Trunk`."""
        if init == "both":
            return [*self.neighbourhood("above-right"), *self.neighbourhood("left")]
        first, last = self.cells - self.row, self.cells  # from above the next cell on
        if init == "above-right":
            last = first + max(self.row // 2, 1)
        elif init == "left":
            first = last - min(LEFT, self.row)
        elif init == "previous":
            first = last - 1
        first, last = max(first, 0), max(last, 0)
        return [(first, last)] if self.sums[first][0] < self.sums[last][0] else []

    def mean_accepted(self, parts: Parts) -> float | None:
        """Mean accepted length of the passes that filled cells of `parts`; None if there are no parts."""
        if not parts:
            return None
        total = 0.0
        for first, last in parts:
            low, high = self.sums[first], self.sums[last]
            total += (high[1] - low[1]) / (high[0] - low[0])
        return total / len(parts)


def accepted_sums(history: History, step: int) -> AcceptedSums:
    """The sums of the cells up to `step`, kept in the history between passes."""
    sums: AcceptedSums | None = history.memo.get(_MEMO)
    if sums is None or sums.start + sums.cells > step + 1:
        sums = history.memo[_MEMO] = AcceptedSums(history)
    sums.extend(history, step)
    return sums


class PassTable(dict[tuple[int, int, int], tuple[bool, float, float]]):
    """What a cell adds to the sums, by depth, nodes and accepted length of the pass that filled it.

    That is whether it counts as drafted, its difficulty, and the milliseconds that it saved. Values are computed when
    they are first looked up. `first`, `scale` and `spent` have an entry for every size, by `size_index`.
    """

    def __init__(
        self,
        first: Sequence[float],  # passes per token of a draft of that size where no guess is wrong
        scale: Sequence[float],  # (passes per token - first) * scale is a difficulty
        spent: Sequence[float],  # milliseconds of the pass
        plain_ms: float,
        *,
        forced_depth: int = 0,  # levels that are no guess: a forced row end
    ) -> None:
        super().__init__()
        self.first, self.scale, self.spent = first, scale, spent
        self.plain_ms, self.forced_depth = plain_ms, forced_depth

    def __missing__(self, key: tuple[int, int, int]) -> tuple[bool, float, float]:
        depth, nodes, accepted = key
        index, passes, value = size_index(nodes, depth), 1 / (accepted + 1), (False, 0.0, 0.0)
        if depth > self.forced_depth:
            difficulty = (passes - self.first[index]) * self.scale[index]
            value = (True, difficulty, self.plain_ms - self.spent[index] * passes)
        self[key] = value
        return value


def size_index(nodes: int, depth: int) -> int:
    """Entry of a size in a `PassTable`; a chain has one node more than levels."""
    return nodes if nodes <= depth + 1 else nodes + MAX_NODES + 1


def _pass_sizes(history: History, first: int, last: int) -> Iterable[tuple[int, int, int]]:
    """Depth, nodes and accepted length of the pass that filled each cell from step `first` to `last`."""
    depth, nodes, accepted, index = history.depth, history.nodes, history.accepted, history.pass_index
    if first <= last and index.item(first) == index.item(last):  # one pass, as between two passes of a decode
        return [(depth.item(last), nodes.item(last), accepted.item(last))] * (last + 1 - first)
    new = slice(first, last + 1)
    return zip(depth[new].tolist(), nodes[new].tolist(), accepted[new].tolist(), strict=True)


class RunningSums(AcceptedSums):
    """Prefix sums that the policy `budget` reads.

    Each entry goes on with the number of tokens that repeat the one to the left or above; with the number of cells that
    a draft filled and their difficulty; and with the latter two again, decayed: a cell's weight is `keep` to the power
    of its distance from the last one. If drafts have cost more than they saved by the end of `RETRY_ROWS`, the
    difficulty of the cells so far no longer counts (`origin`), only their accepted lengths and repeats. The first rows
    are the hardest to guess: the first has no row above it, and many photographs begin with noisy sky.
    """

    def __init__(self, history: History, table: PassTable, keep: float) -> None:
        super().__init__(history)
        self.table, self.keep, self.image_cells = table, keep, history.layout.stop - history.layout.start
        self.sums = [(0, 0, 0, 0, 0.0, 0.0, 0.0)]
        self.saved_ms = 0.0  # of all drafted passes, against plain decoding of the same cells
        self.origin = 0  # first cell whose difficulty counts
        self._tokens = [-1] * self.row  # those of the cells; before them, a row that nothing repeats

    def extend(self, history: History, step: int) -> None:
        table, keep, sums, tokens, row = self.table, self.keep, self.sums, self._tokens, self.row
        first, retry = self.start + self.cells, RETRY_ROWS * row + 1
        passes, accepted, repeats, drafted, difficulty, decayed_drafted, decayed_difficulty = sums[-1]
        new_tokens = history.tokens[first : step + 1].tolist()
        for size, token in zip(_pass_sizes(history, first, step), new_tokens, strict=True):
            is_drafted, cell_difficulty, saved_ms = table[size]
            passes += size[1] > 0  # a cell that no pass filled has no nodes
            accepted += size[2]
            repeats += token == tokens[-1] or token == tokens[-row]
            drafted += is_drafted
            difficulty += cell_difficulty
            decayed_drafted = keep * decayed_drafted + is_drafted
            decayed_difficulty = keep * decayed_difficulty + cell_difficulty
            sums.append((passes, accepted, repeats, drafted, difficulty, decayed_drafted, decayed_difficulty))
            tokens.append(token)
            self.saved_ms += saved_ms
            if len(sums) == retry and self.saved_ms < 0:
                self.origin = retry - 1
        self.cells = len(sums) - 1

    def repeat_share(self) -> float:
        """Share of the last row's tokens that are repeats; of the first third of a row, as if it were as long."""
        first = max(self.cells - self.row, 1)
        repeats = self.sums[-1][2] - self.sums[min(first, self.cells)][2]
        return repeats / max(self.cells - first, self.row // 3, 1)

    def weighted(self, parts: Parts) -> tuple[float, float]:
        """Sums of drafted cells and of their difficulty: decayed, but of equal weight in `parts`."""
        drafted, difficulty = self._decayed(self.origin, self.cells)
        for first, last in parts:
            first, last = max(first, self.origin), max(last, self.origin)
            drafted_low, difficulty_low = self.sums[first][3:5]
            drafted_high, difficulty_high = self.sums[last][3:5]
            decayed_drafted, decayed_difficulty = self._decayed(first, last)
            drafted += (drafted_high - drafted_low) / len(parts) - decayed_drafted
            difficulty += (difficulty_high - difficulty_low) / len(parts) - decayed_difficulty
        return drafted, difficulty

    def _decayed(self, first: int, last: int) -> tuple[float, float]:
        """The decayed sums of the cells from `first` to before `last`."""
        low, high = self.keep ** (self.cells - first), self.keep ** (self.cells - last)
        (drafted_low, difficulty_low), (drafted, difficulty) = self.sums[first][5:], self.sums[last][5:]
        return high * drafted - low * drafted_low, high * difficulty - low * difficulty_low
