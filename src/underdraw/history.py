"""History: what happened at every step of one image. What policies read, metrics sum and pictures show.

Numpy only. Rows are steps of the layout; a step that no tree has produced yet has `tree` -1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from underdraw.layout import Layout
from underdraw.plan import TreePlan

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class TokenStats:
    """How sure the target was of one token: what it drew from, after temperature and filters.

    At temperature 0 nothing is drawn; it is the law of temperature 1 then.
    """

    entropy: float  # nats
    top1: float  # chance of the most likely token


@dataclass(frozen=True, slots=True)
class StepResult:
    """One target pass for one image of the batch. Callbacks, progress bars, servers and benchmarks all take this."""

    index: int  # which pass of this decode
    sequence: int  # which image of the batch
    start: int  # step of the tree's root
    accepted: int  # drafted nodes that the target agreed with
    plan: TreePlan
    tokens: tuple[int, ...]  # new tokens: the accepted ones and the target's own next one
    ranks: tuple[int, ...]  # of each accepted node among its siblings
    seconds: float  # the whole pass, shared by the batch
    token_stats: tuple[TokenStats, ...] = ()  # of each new token, if the decode keeps them


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """The tree that produced one step."""

    depth: int
    width: int
    accepted: int

    @property
    def rate(self) -> float:
        """Accepted share of the depth; a tree that could not reach anything counts as fully accepted."""
        return self.accepted / self.depth if self.depth else 1.0


def _column(layout: Layout, value: float, dtype: type) -> NDArray[Any]:
    return np.full(layout.steps, value, dtype=dtype)


@dataclass(slots=True)
class History:
    """One image's tokens and, for each step, the tree it came from."""

    layout: Layout
    seed: int = 0
    passes: int = 0
    seconds: float = 0.0
    tokens: NDArray[np.int64] = field(init=False)
    pass_index: NDArray[np.int32] = field(
        init=False
    )  # which pass produced the step; -1 not yet, -2 forced or prefilled
    depth: NDArray[np.int16] = field(init=False)  # depth and width of that tree's plan
    width: NDArray[np.int16] = field(init=False)
    nodes: NDArray[np.int16] = field(init=False)
    accepted: NDArray[np.int16] = field(init=False)  # drafted nodes that were accepted in that pass
    rank: NDArray[np.int16] = field(init=False)  # rank of the accepted node; -1 where the target chose alone
    entropy: NDArray[np.float32] = field(init=False)  # of the target's law; NaN where it was not kept
    top1: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        self.tokens = _column(layout, -1, np.int64)
        self.pass_index = _column(layout, -1, np.int32)
        for name in ("depth", "width", "nodes", "accepted"):
            setattr(self, name, _column(layout, 0, np.int16))
        self.rank = _column(layout, -1, np.int16)
        self.entropy, self.top1 = (_column(layout, np.nan, np.float32) for _ in range(2))
        for step, token in enumerate(layout.prologue):
            self.tokens[step], self.pass_index[step] = token, -2

    @property
    def next_step(self) -> int:
        """The first step that has no token yet."""
        missing = np.flatnonzero(self.tokens < 0)
        return int(missing[0]) if len(missing) else self.layout.steps

    def record_first(self, token: int, law: TokenStats | None = None) -> None:
        """The first token, drawn from the prompt alone."""
        if law is not None:
            self.entropy[self.layout.start], self.top1[self.layout.start] = law.entropy, law.top1
        self.tokens[self.layout.start] = token
        self.pass_index[self.layout.start] = -2
        self._finish(self.layout.start + 1)

    def record(self, step: StepResult) -> None:
        """Note one pass."""
        first = step.start + 1
        stop = first + len(step.tokens)
        self.tokens[first:stop] = step.tokens
        self.pass_index[first:stop] = self.passes
        self.depth[first:stop] = step.plan.depth
        self.width[first:stop] = step.plan.width
        self.nodes[first:stop] = step.plan.nodes
        self.accepted[first:stop] = step.accepted
        self.rank[first : first + len(step.ranks)] = step.ranks
        if step.token_stats:
            self.entropy[first:stop] = [law.entropy for law in step.token_stats]
            self.top1[first:stop] = [law.top1 for law in step.token_stats]
        self.passes += 1
        self.seconds += step.seconds
        self._finish(stop)

    def _finish(self, step: int) -> None:
        """Fill in what follows the last cell: all of it is forced."""
        layout = self.layout
        if step < layout.stop:
            return
        tail = layout.epilogue if layout.row_end is None else (layout.row_end, *layout.epilogue)
        self.tokens[layout.stop :] = tail
        self.pass_index[layout.stop :] = -2

    def tree_at(self, step: int) -> TreeRecord | None:
        """The tree that produced `step`, if a tree did."""
        if not 0 <= step < self.layout.steps or self.pass_index[step] < 0:
            return None
        return TreeRecord(int(self.depth[step]), int(self.width[step]), int(self.accepted[step]))

    @property
    def done(self) -> bool:
        return bool(self.tokens[self.layout.stop - 1] >= 0)

    @property
    def tokens_per_pass(self) -> float:
        """tau: tokens of the raster over target passes, the prompt's own pass left out of both."""
        drawn = int((self.pass_index >= 0).sum())
        return drawn / self.passes if self.passes else float("nan")

    @property
    def mean_depth(self) -> float:
        """Depth of the trees, averaged over passes."""
        return self._per_pass(self.depth)

    @property
    def mean_nodes(self) -> float:
        return self._per_pass(self.nodes)

    def _per_pass(self, column: NDArray[Any]) -> float:
        _, first = np.unique(self.pass_index[self.pass_index >= 0], return_index=True)
        return float(column[self.pass_index >= 0][first].mean()) if len(first) else float("nan")

    def grid(self, name: str) -> NDArray[Any]:
        """A column as a (height, width) map over the picture."""
        layout = self.layout
        raster = getattr(self, name)[layout.start : layout.start + layout.row_stride * layout.height]
        return raster.reshape(layout.height, layout.row_stride)[:, : layout.width]

    def heatmap(self, picture: Image | None = None) -> Image:
        """Accepted length, depth, entropy and top-1 chance of every cell, over the picture if it is given."""
        from underdraw.images import heatmap

        return heatmap(self, picture)
