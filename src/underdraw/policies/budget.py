"""Size of Jacobi chains and trees by cost: the number of nodes with the least time per token, cell by cell.

Passes per token of a Jacobi chain of n nodes are close to `d + (1 - d) * reach / n`, for easy and hard pictures alike
(in landscapes small windows look harder than large ones).
The difficulty d is how often a guess is wrong however often it was verified; the second part is how far ahead guesses
are verified before they are needed. A tree of n nodes makes fewer mistakes and looks less far ahead. The difficulty of
the next cells is read off passes of the row above; what a pass of n nodes costs was measured on this machine. Both
together give the time per token of every size, one node (plain decoding) among them. The curve was fitted to the
embedded model (docs/lab.md).

Estimates can be wrong, so there is a ledger as well: what drafting this picture has cost, against what plain decoding
of the same cells would have. No pass is drafted that could bring it below minus 1 % of the picture (3 % where tokens
repeat their neighbours, and guesses are good). Where the first rows are harder than the rest, that would be the end of
drafting, so after two rows such a picture is judged anew, with another 1.5 %.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import MAX_NODES, TreePlan, chain_plan
from underdraw.policies.fixed import NoTree
from underdraw.policies.running_sums import Parts, PassTable, RunningSums
from underdraw.policies.trunk import Trunk

TREE_REACH, TREE_DIFFICULTY = 2.8, 0.72  # the latter: of the difficulty of a chain
_LARGE_TREE = 64  # nodes, above which more nodes become branches rather than a longer trunk
PRIOR_DIFFICULTY = 0.13  # of a chain: between a sprite on a plain background (0.05) and a landscape (0.5)
_HARD_DIFFICULTY = 0.55  # the same where no token equals its neighbours, as in photos
_MANY_REPEATS = 0.3  # share of tokens that equal the one above or to the left, from which on guesses are good
_PRIOR_CELLS = 6.0  # cells that the prior is worth
_HALF_LIFE = 4.0  # rows after which a cell outside of the neighbourhood counts half
_TRUST = 2.0  # allowances more where tokens repeat: drafting pays there in the end
_RETRY_ALLOWANCE = 1.5  # allowances more where a picture is judged anew: guesses need some passes to become right
_RETRY_DIFFICULTY = 0.3  # assumed then: of small chains on landscapes of the embedded model
_NEARLY = 1.03  # times per token up to this ratio count as equal
_PLAN_MS = 0.1  # that the host takes to choose a size
_LONGEST_PAUSE = 8  # cells
_PLAIN = NoTree()
_MEMO = "budget"  # key in `History.memo`
Costs = tuple[tuple[int, float], ...]  # (nodes, milliseconds), ascending


def passes_per_token(nodes: int, difficulty: float, row: int, *, is_tree: bool = False) -> float:
    """Expected passes per token of a Jacobi chain or tree of so many nodes; a row of the picture has `row` tokens."""
    first = _first_passes(nodes, row, is_tree)
    if is_tree:
        difficulty *= TREE_DIFFICULTY
    return min(difficulty + (1 - difficulty) * first, 1.0)


def _first_passes(nodes: int, row: int, is_tree: bool) -> float:
    """Passes per token where no guess is wrong: `reach / nodes`. A chain reaches further if it spans a row."""
    reach = 2.0 if nodes >= row else min(1 + 0.11 * nodes, 2.25)
    if is_tree:
        reach = TREE_REACH * max(nodes / _LARGE_TREE, 1.0) ** 0.65
    return min(reach / nodes, 0.95)


@dataclass(frozen=True, slots=True)
class Budget:
    """`chain` and `tree` are measured costs, as `nodes:milliseconds` with `/` between; `tree` None: no trees.

    One node is plain decoding. A picture whose guesses are bad takes at most `allowance` longer by these costs, and 1.5
    times that once more after its first rows. `init` is the neighbourhood that the difficulty is read off, as in
    `trunk`.
    """

    chain: str = "1:10/2:12/4:13/8:15/12:18/18:22/24:26/32:32/64:55"
    tree: str | None = None
    init: Literal["above", "left", "above-right", "both", "previous"] = "above"
    allowance: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.allowance <= 1:
            raise ConfigError(f"budget:allowance={self.allowance} must lie in [0, 1]; 0.01 is 1 % of a picture.")
        if not any(nodes > 1 for nodes, _ in parse_costs(self.chain)):
            raise ConfigError(f"budget:chain={self.chain} has no size to draft; add pairs such as 8:14.")
        if self.tree and parse_costs(self.tree)[0][0] < 2:
            raise ConfigError(f"budget:tree={self.tree} has a tree of one node, which is no draft; use at least 2.")

    def plan(self, history: History, step: int) -> TreePlan:
        # The host plans between two passes, and a pass may take less than a millisecond: plain numbers, no arrays.
        state: _ImageState | None = history.memo.get(_MEMO)
        if state is None or state.policy is not self or state.sums.start + state.sums.cells > step + 1:
            state = history.memo[_MEMO] = self._open_state(history)
        costs, sums = state.costs, state.sums
        # Where passes are so short that choosing a size costs more than 1 %, plain decoding goes on for a few cells.
        if (step - sums.start) % costs.pause and history.nodes[step] == 1:
            return _PLAIN.plan(history, step)
        sums.extend(history, step)
        share = min(sums.repeat_share() / _MANY_REPEATS, 1.0)
        most_ms = math.inf
        if costs.has_plain:
            # Half of what may be lost, so that one failure is not the last try.
            most_ms = costs.plain_ms + self._spare_ms(sums, share) / 2
            if most_ms < costs.least_ms:
                return _PLAIN.plan(history, step)
        parts = sums.neighbourhood(self.init)
        best = _cheapest(costs.sizes, _difficulty(sums, parts, step, share), most_ms)
        if best.is_tree:
            return _trunk(best.nodes, self.init).plan_by_mean(sums.mean_accepted(parts))
        return chain_plan(best.nodes - 1) if best.nodes > 1 else _PLAIN.plan(history, step)

    def _open_state(self, history: History) -> _ImageState:
        layout = history.layout
        costs = _read_costs(self.chain, self.tree, layout.row_stride, layout.row_end is not None)
        keep = 0.5 ** (1 / (_HALF_LIFE * layout.row_stride))
        return _ImageState(self, costs, RunningSums(history, costs.table, keep))

    def _spare_ms(self, sums: RunningSums, share: float) -> float:
        """Milliseconds that drafting may lose from here on: what it has saved so far, and the allowance."""
        trust = 1 + _TRUST * max(2 * share - 1, 0.0) + _RETRY_ALLOWANCE * (sums.origin > 0)
        allowed = self.allowance * trust * sums.image_cells * sums.table.plain_ms
        return max(allowed + sums.saved_ms, 0.0)


def _difficulty(sums: RunningSums, parts: Parts, step: int, share: float) -> float:
    """Difficulty of the cells after `step`, by what passes in the neighbourhood and in all rows above accepted.

    The prior is the difficulty that committed tokens suggest, which costs no pass.
    """
    drafted, difficulty = sums.weighted(parts)
    easy = 1.0 if step - sums.start < sums.row // 3 else share  # too few tokens to tell
    hard = _RETRY_DIFFICULTY if sums.origin else _HARD_DIFFICULTY
    prior = hard + (PRIOR_DIFFICULTY - hard) * easy
    return min(max((difficulty + _PRIOR_CELLS * prior) / (drafted + _PRIOR_CELLS), 0.02), 1.0)


@dataclass(frozen=True, slots=True)
class _Size:
    """A size of draft that a policy may choose; one node is plain decoding."""

    nodes: int
    is_tree: bool
    ms: float  # of a pass
    first: float  # passes per token where no guess is wrong
    factor: float  # of the difficulty, relative to a chain


@dataclass(frozen=True, slots=True)
class _Costs:
    """The measured costs of a policy, for images of one layout."""

    sizes: tuple[_Size, ...]
    table: PassTable  # that finished passes are judged by
    plain_ms: float  # of the smallest size
    has_plain: bool  # whether that is plain decoding
    least_ms: float  # of the other sizes
    pause: int  # cells from one choice of a size to the next while decoding is plain


@dataclass(frozen=True, slots=True)
class _ImageState:
    """What a policy keeps in `History.memo` between the passes of an image."""

    policy: Budget
    costs: _Costs
    sums: RunningSums


@functools.lru_cache(maxsize=16)
def _read_costs(chain: str, tree: str | None, row: int, has_row_ends: bool) -> _Costs:
    """The costs of a policy for images with `row` tokens in a row."""
    measured = parse_costs(chain)
    plain_ms, has_plain = measured[0][1], measured[0][0] == 1
    sizes = _list_sizes(measured, parse_costs(tree) if tree else (), row)
    if has_row_ends:  # two nodes are plain decoding
        sizes = tuple(size for size in sizes if size.nodes != 2 or size.is_tree) or sizes
    drafts = [size.ms for size in sizes if size.nodes > 1]
    pause = min(math.ceil(_PLAN_MS / (0.01 * plain_ms)), _LONGEST_PAUSE) if has_plain else 1
    table = _pass_table(chain, tree, row, has_row_ends)
    return _Costs(sizes, table, plain_ms, has_plain, min(drafts, default=math.inf), pause)


def _list_sizes(chain: Costs, tree: Costs, row: int) -> tuple[_Size, ...]:
    """Chains and trees of all measured sizes."""
    chains = [
        _Size(nodes, False, ms, _first_passes(nodes, row, False) if nodes > 1 else 1.0, 1.0) for nodes, ms in chain
    ]
    trees = [_Size(nodes, True, ms, _first_passes(nodes, row, True), TREE_DIFFICULTY) for nodes, ms in tree]
    return (*chains, *trees)


def _pass_table(chain: str, tree: str | None, row: int, has_row_ends: bool) -> PassTable:
    sizes, columns = np.arange(MAX_NODES + 1), []
    for costs, is_tree in ((parse_costs(chain), False), (parse_costs(tree or chain), True)):
        first = np.array([_first_passes(max(nodes, 1), row, is_tree) for nodes in sizes.tolist()])
        scale = 1 / (1 - first) / (TREE_DIFFICULTY if is_tree else 1.0)
        measured, milliseconds = zip(*costs, strict=True)
        columns.append((first, scale, np.interp(sizes, measured, milliseconds)))
    first, scale, spent = np.concatenate(columns, axis=1).tolist()
    return PassTable(first, scale, spent, parse_costs(chain)[0][1], forced_depth=int(has_row_ends))


_trunk = functools.lru_cache(maxsize=64)(Trunk)  # checking its options takes longer than planning


def cheapest_size(chain: Costs, tree: Costs, difficulty: float, row: int) -> tuple[int, bool]:
    """Nodes, and whether as a tree, with the least milliseconds per token; of nearly equal sizes the largest."""
    best = _cheapest(_list_sizes(chain, tree, row), difficulty)
    return best.nodes, best.is_tree


def _cheapest(sizes: Sequence[_Size], difficulty: float, most_ms: float = math.inf) -> _Size:
    """The size with the least milliseconds per token, of passes up to `most_ms`; of nearly equal sizes the largest.

    A larger window verifies guesses more often before they are needed. Where windows shrink too soon, the next cells
    look harder than they are, and windows shrink further. `difficulty` is at most 1.
    """
    times = []
    for size in sizes:
        hard, ms = difficulty * size.factor, size.ms
        times.append(ms * (hard + (1 - hard) * size.first) if ms <= most_ms else math.inf)
    least = min(times)
    best, nearly_least, chosen = sizes[times.index(least)], _NEARLY * least, math.inf
    if best.nodes == 1:
        return best
    for size, spent in zip(sizes, times, strict=True):
        if spent <= nearly_least and (size.nodes > best.nodes or (size.nodes == best.nodes and spent < chosen)):
            best, chosen = size, spent
    return best


@functools.lru_cache(maxsize=64)
def parse_costs(text: str) -> Costs:
    """The pairs of `nodes:milliseconds/nodes:milliseconds`, in order of nodes."""
    try:
        pairs = sorted((int(nodes), float(ms)) for nodes, ms in (item.split(":") for item in text.split("/")))
    except ValueError:
        raise ConfigError(f"costs {text!r} must be nodes:milliseconds pairs separated by /, as 1:10/16:19.") from None
    if not all(1 <= nodes <= MAX_NODES and 0 < ms < float("inf") for nodes, ms in pairs):
        raise ConfigError(f"costs {text!r} must have 1 to {MAX_NODES} nodes and positive milliseconds.")
    return tuple(pairs)


def format_costs(costs: Costs) -> str:
    """The text that `parse_costs` reads."""
    return "/".join(f"{nodes}:{ms:g}" for nodes, ms in costs)
