"""Size of Jacobi chains and trees by cost: the number of nodes with the least time per token, cell by cell.

Passes per token of a Jacobi chain of n nodes are close to `d + (1 - d) * reach / n`, for easy and hard pictures alike.
The difficulty d is how often a guess is wrong however often it was verified; the second part is how far ahead guesses
are verified before they are needed. A tree of n nodes makes fewer mistakes and looks less far ahead. The difficulty of
the next cells is read off passes of the row above; what a pass of n nodes costs was measured on this machine. Both
together give the time per token of every size, one node (plain decoding) among them. The curve was fitted to the
embedded model (docs/lab.md).

Estimates can be wrong, so there is a ledger as well: what drafting this picture has cost, against what plain decoding
of the same cells would have. No pass is drafted that could bring it below minus 1 % of the picture
(3 % where tokens repeat their neighbours, and guesses are good).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import MAX_NODES, TreePlan, chain_plan
from underdraw.policies.trunk import Trunk, neighbourhood

TREE_REACH, TREE_DIFFICULTY = 2.4, 0.72  # the latter: of the difficulty of a chain
PRIOR_DIFFICULTY = 0.13  # of a chain: between a sprite on a plain background (0.05) and a landscape (0.5)
_HARD_DIFFICULTY = 0.55  # the same where no token equals its neighbours, as in photos
_MANY_REPEATS = 0.3  # share of tokens that equal the one above or to the left, from which on guesses are good
_PRIOR_CELLS = 6.0  # cells that the prior is worth
_HALF_LIFE = 4.0  # rows after which a cell outside of the neighbourhood counts half
_TRUST = 2.0  # allowances more where tokens repeat: drafting pays there in the end
_NEARLY = 1.03  # times per token up to this ratio count as equal
Costs = tuple[tuple[int, float], ...]  # (nodes, milliseconds), ascending


def passes_per_token(nodes: int, difficulty: float, row: int, *, is_tree: bool = False) -> float:
    """Expected passes per token of a Jacobi chain or tree of so many nodes; a row of the picture has `row` tokens."""
    first = _first_passes(nodes, row, is_tree)
    if is_tree:
        difficulty *= TREE_DIFFICULTY
    return min(difficulty + (1 - difficulty) * first, 1.0)


def _first_passes(nodes: int, row: int, is_tree: bool) -> float:
    """Passes per token where no guess is wrong: `reach / nodes`. A chain reaches further if it spans a row."""
    reach = TREE_REACH if is_tree else 2.0 if nodes >= row else min(1 + 0.11 * nodes, 2.25)
    return min(reach / nodes, 0.95)


@dataclass(frozen=True, slots=True)
class Budget:
    """`chain` and `tree` are measured costs, as `nodes:milliseconds` with `/` between; `tree` None: no trees.

    One node is plain decoding. A picture whose guesses are bad takes at most `allowance` longer by these costs.
    `init` is the neighbourhood that the difficulty is read off, as in `trunk`.
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
        if self.tree:
            parse_costs(self.tree)

    def plan(self, history: History, step: int) -> TreePlan:
        chain, tree = parse_costs(self.chain), parse_costs(self.tree) if self.tree else ()
        share = _repeat_share(history, step)
        if chain[0][0] == 1:
            most = chain[0][1] + self._spare_ms(history, step, share) / 2  # so that one failure is not the last try
            chain, tree = (tuple((nodes, ms) for nodes, ms in costs if ms <= most) for costs in (chain, tree))
        row = history.layout.row_stride
        nodes, is_tree = cheapest_size(chain, tree, self._difficulty(history, step, share), row)
        if is_tree:
            return Trunk(nodes, self.init).plan(history, step)
        return chain_plan(nodes - 1)

    def _spare_ms(self, history: History, step: int, share: float) -> float:
        """Milliseconds that drafting may lose from here on: what it has saved so far, and the allowance."""
        plain, layout = parse_costs(self.chain)[0][1], history.layout
        past = slice(layout.start, step + 1)
        depth, nodes = history.depth[past], history.nodes[past]
        spent = _cost_table(self.chain, self.tree)[(nodes > depth + 1).view(np.int8), nodes]
        saved = float(np.dot(depth > 0, plain - spent / (history.accepted[past] + 1.0)))
        trust = 1 + _TRUST * max(2 * share - 1, 0.0)
        return max(self.allowance * trust * (layout.stop - layout.start) * plain + saved, 0.0)

    def _difficulty(self, history: History, step: int, share: float) -> float:
        """Difficulty of the cells after `step`, by what passes in the neighbourhood and in all rows above accepted.

        The prior is the difficulty that committed tokens suggest, which costs no pass.
        """
        layout, row = history.layout, history.layout.row_stride
        past = slice(layout.start, step + 1)
        depth, nodes = history.depth[past], history.nodes[past]
        first, scale = _difficulty_tables(row)
        index = (nodes > depth + 1).view(np.int8), nodes  # a chain has one node more than levels
        difficulty = (1 / (history.accepted[past] + 1.0) - first[index]) * scale[index]
        weights = _decay(layout.steps, row)[-len(depth) :] * (depth > 0)
        if self.init == "above":
            weights[-row:] = depth[-row:] > 0
        else:
            parts = neighbourhood(history, step, self.init)
            for part in parts:
                weights[part - layout.start] = (history.depth[part] > 0) / len(parts)
        easy = 1.0 if step - layout.start < row // 3 else share  # too few tokens to tell
        prior = _HARD_DIFFICULTY + (PRIOR_DIFFICULTY - _HARD_DIFFICULTY) * easy
        total = float(np.dot(weights, difficulty)) + _PRIOR_CELLS * prior
        return min(max(total / (float(weights.sum()) + _PRIOR_CELLS), 0.02), 1.0)


@functools.lru_cache(maxsize=16)
def _cost_table(chain: str, tree: str | None) -> NDArray[np.float64]:
    """Milliseconds of a pass by (is it a tree, nodes): (2, MAX_NODES + 1)."""
    table = []
    for costs in (parse_costs(chain), parse_costs(tree or chain)):
        sizes, milliseconds = zip(*costs, strict=True)
        table.append(np.interp(np.arange(MAX_NODES + 1), sizes, milliseconds))
    return np.stack(table)


@functools.lru_cache(maxsize=16)
def _difficulty_tables(row: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Offsets and factors by (is it a tree, nodes) that turn passes per token into a difficulty."""
    first = np.array(
        [[_first_passes(max(n, 1), row, is_tree) for n in range(MAX_NODES + 1)] for is_tree in (False, True)]
    )
    return first, 1 / (1 - first) / np.array([[1.0], [TREE_DIFFICULTY]])


@functools.lru_cache(maxsize=16)
def _decay(steps: int, row: int) -> NDArray[np.float64]:
    """The weight of a cell by its distance to the last one, which comes last."""
    return np.asarray(0.5 ** (np.arange(steps)[::-1] / (_HALF_LIFE * row)))


def _repeat_share(history: History, step: int) -> float:
    """How easy the last row of tokens looks, from 0 to 1, by how many equal the one above or to the left.

    Where many do, guesses are good. So this tells, after plain decoding, where drafting pays again.
    """
    layout, tokens = history.layout, history.tokens
    first, row = max(step + 1 - layout.row_stride, layout.start + 1), layout.row_stride
    cells = tokens[first : step + 1]
    is_repeat = cells == tokens[first - 1 : step]
    if first >= layout.start + row:
        is_repeat |= cells == tokens[first - row : step + 1 - row]
    return min(float(is_repeat.sum()) / (_MANY_REPEATS * max(len(cells), row // 3, 1)), 1.0)


def cheapest_size(chain: Costs, tree: Costs, difficulty: float, row: int) -> tuple[int, bool]:
    """Nodes, and whether as a tree, with the least milliseconds per token; of nearly equal sizes the largest.

    A larger window verifies guesses more often before they are needed. Where windows shrink too soon, the next cells
    look harder than they are, and windows shrink further.
    """
    options = [(ms * passes_per_token(nodes, difficulty, row), nodes, False) for nodes, ms in chain if nodes > 1]
    options += [(ms * passes_per_token(nodes, difficulty, row, is_tree=True), nodes, True) for nodes, ms in tree]
    options += [(ms, 1, False) for nodes, ms in chain if nodes == 1]
    least, nodes, is_tree = min(options)
    if nodes > 1:
        _, nodes, is_tree = max(
            (option for option in options if option[0] <= _NEARLY * least), key=lambda o: (o[1], -o[0])
        )
    return nodes, is_tree


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
