"""History: which pass and which tree produced every step of one image. Policies, metrics and heat maps read it.

Numpy only.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError, unknown
from underdraw.layout import Layout
from underdraw.plan import TreePlan

if TYPE_CHECKING:
    from PIL.Image import Image

NOT_YET, NO_PASS = -1, -2  # values of `History.pass_index`: no token yet; forced, or sampled from the prefill


@dataclass(frozen=True, slots=True)
class TokenStats:
    """How certain the target was of one token, after temperature and filters; at temperature 0 as for temperature 1."""

    entropy: float  # nats
    top1: float  # probability of the most likely token


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one target pass for one image; what callbacks, progress bars and benchmarks receive."""

    index: int  # number of the pass within the decode
    sequence: int  # index of the image within the batch
    start: int  # step of the tree's root
    accepted: int  # number of accepted draft tokens
    plan: TreePlan
    tokens: tuple[int, ...]  # new tokens: the accepted ones, then the one sampled by the target
    ranks: tuple[int, ...]  # rank of each accepted token among its siblings
    seconds: float  # of the whole pass, shared by the batch
    token_stats: tuple[TokenStats, ...] = ()  # of each new token, if the decode records them


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """The tree that produced a step."""

    depth: int
    width: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over depth; 1 for a tree without depth."""
        return self.accepted / self.depth if self.depth else 1.0


@dataclass(slots=True)
class History:
    """The tokens of one image and the pass that produced each of them; arrays have one entry per step."""

    layout: Layout
    seed: int = 0
    prompt: str = ""  # for image decoders that read it too
    passes: int = 0
    seconds: float = 0.0
    tokens: NDArray[np.int64] = field(init=False)  # -1 where there is none yet
    pass_index: NDArray[np.int32] = field(init=False)  # number of the pass, NOT_YET or NO_PASS
    depth: NDArray[np.int16] = field(init=False)  # depth, width and nodes of that pass's tree plan
    width: NDArray[np.int16] = field(init=False)
    nodes: NDArray[np.int16] = field(init=False)
    accepted: NDArray[np.int16] = field(init=False)  # accepted draft tokens of that pass
    rank: NDArray[np.int16] = field(init=False)  # of the accepted node; -1 for a token that was not drafted
    entropy: NDArray[np.float32] = field(init=False)  # token statistics; NaN where they were not recorded
    top1: NDArray[np.float32] = field(init=False)
    stop: int = field(init=False)  # of the layout; read in every pass
    memo: dict[str, Any] = field(init=False, repr=False, default_factory=dict)  # what policies keep between passes

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise ConfigError(
                f"a history needs a Layout, not {self.layout!r}; make one with Layout() or pipe.model.make_layout()."
            )
        steps, self.stop = self.layout.steps, self.layout.stop
        self.tokens = np.full(steps, -1, dtype=np.int64)
        self.pass_index = np.full(steps, NOT_YET, dtype=np.int32)
        for name in ("depth", "width", "nodes", "accepted"):
            setattr(self, name, np.zeros(steps, dtype=np.int16))
        self.rank = np.full(steps, -1, dtype=np.int16)
        self.entropy, self.top1 = (np.full(steps, np.nan, dtype=np.float32) for _ in range(2))
        start = self.layout.start
        self.tokens[:start] = self.layout.prologue
        self.pass_index[:start] = NO_PASS

    @property
    def next_step(self) -> int:
        """The first step without a token."""
        missing = np.flatnonzero(self.tokens < 0)
        return int(missing[0]) if len(missing) else self.layout.steps

    def record_first(self, token: int, stats: TokenStats | None = None) -> None:
        """Record the first token, which is sampled from the prefill."""
        start = self.layout.start
        if stats is not None:
            self.entropy[start], self.top1[start] = stats.entropy, stats.top1
        self.tokens[start] = token
        self.pass_index[start] = NO_PASS
        self._fill_forced_tail(start + 1)

    def record(self, result: StepResult) -> None:
        """Record one pass."""
        first, plan = result.start + 1, result.plan
        stop = first + len(result.tokens)
        new = slice(first, stop)
        self.tokens[new] = result.tokens
        self.pass_index[new] = self.passes
        self.depth[new], self.width[new], self.nodes[new] = plan.depth, plan.width, plan.nodes
        self.accepted[new] = result.accepted
        if result.ranks:
            self.rank[first : first + len(result.ranks)] = result.ranks
        if result.token_stats:
            self.entropy[first:stop] = [stats.entropy for stats in result.token_stats]
            self.top1[first:stop] = [stats.top1 for stats in result.token_stats]
        self.passes += 1
        self.seconds += result.seconds
        self._fill_forced_tail(stop)

    def _fill_forced_tail(self, next_step: int) -> None:
        """Fill in the forced tokens after the last cell once it has a token."""
        if next_step < self.stop:
            return
        layout = self.layout
        tail = layout.epilogue if layout.row_end is None else (layout.row_end, *layout.epilogue)
        self.tokens[layout.stop :] = tail
        self.pass_index[layout.stop :] = NO_PASS

    def tree_at(self, step: int) -> TreeRecord | None:
        """The tree that produced `step`, if one did."""
        if not 0 <= step < self.layout.steps or self.pass_index[step] < 0:
            return None
        return TreeRecord(int(self.depth[step]), int(self.width[step]), int(self.accepted[step]))

    @property
    def done(self) -> bool:
        return bool(self.tokens[self.stop - 1] >= 0)

    @property
    def tokens_per_pass(self) -> float:
        """tau: raster tokens per target pass; the prefill and its token are not counted."""
        tokens = int((self.pass_index >= 0).sum())
        return tokens / self.passes if self.passes else float("nan")

    @property
    def mean_depth(self) -> float:
        """Tree depth, averaged over passes."""
        return self._mean_over_passes(self.depth)

    @property
    def mean_nodes(self) -> float:
        """Tree nodes, averaged over passes."""
        return self._mean_over_passes(self.nodes)

    def _mean_over_passes(self, values: NDArray[Any]) -> float:
        has_pass = self.pass_index >= 0
        _, first = np.unique(self.pass_index[has_pass], return_index=True)
        return float(values[has_pass][first].mean()) if len(first) else float("nan")

    def grid(self, name: str) -> NDArray[Any]:
        """The array `name` as a (height, width) grid of cells: `tokens`, `accepted`, `depth`, `entropy`, ..."""
        arrays = [item.name for item in fields(self) if isinstance(getattr(self, item.name), np.ndarray)]
        if name not in arrays:
            raise unknown("array of a history", name, arrays)
        layout = self.layout
        raster = getattr(self, name)[layout.grid_start : layout.grid_start + layout.row_stride * layout.height]
        return raster.reshape(layout.height, layout.row_stride)[:, : layout.width]

    def heatmap(self, image: Image | None = None) -> Image:
        """Heat maps of accepted tokens, depth, entropy and top-1 probability of every cell, drawn over the image."""
        from underdraw.images import heatmap

        return heatmap(self, image)


def check_history_list(histories: object) -> None:
    """Raise a ConfigError for anything but histories in a list, such as one history or scheduled images."""
    if not isinstance(histories, Sequence) or any(not isinstance(history, History) for history in histories):
        raise ConfigError(f"a list of histories is needed, not {reprlib.repr(histories)}; pass one History per image.")
