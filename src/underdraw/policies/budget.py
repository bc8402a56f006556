"""Size of Jacobi chains and trees by cost: the number of nodes with the least time per token, cell by cell.

Passes per token of a Jacobi chain of n >= 12 nodes are close to `difficulty + b / n`, for easy and hard pictures alike:
the first part is how often a guess is wrong however often it was verified, the second how far ahead guesses are
verified before they are needed; b is 1.75 if the chain spans a row of the picture, else 2.05. Chains below 12 nodes are
worse than that, since their guesses are hardly verified at all. A tree of n nodes makes fewer mistakes and looks less
far ahead. The difficulty of the next cells is read off the row above; what a pass of n nodes costs was measured on this
machine. Both together give the time per token of every size, and whether branches pay. The curve was fitted to the
embedded model (docs/lab.md).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.plan import MAX_NODES, TreePlan
from underdraw.policies.trunk import Trunk, neighbourhood

CHAIN_REACH, SHORT_CHAIN_REACH, TREE_REACH = 1.75, 2.05, 2.4  # b; short: of less than a row of the picture
TREE_DIFFICULTY = 0.82  # of the difficulty of a chain
PRIOR_DIFFICULTY = 0.13  # passes per token of a long chain: between an emoji (0.05) and a photo (0.2)
_PRIOR_CELLS = 4.0  # cells that the prior is worth
_LOSS = 0.3  # over the number of rows drafted: how much slower than plain decoding is too slow
Costs = tuple[tuple[int, float], ...]  # (nodes, milliseconds), ascending


def passes_per_token(nodes: int, difficulty: float, row: int, *, is_tree: bool = False) -> float:
    """Expected passes per token of a Jacobi chain or tree of so many nodes; a row of the picture has `row` tokens."""
    if is_tree:
        return min(TREE_DIFFICULTY * difficulty + TREE_REACH / nodes, 1.0)
    return min(difficulty + (SHORT_CHAIN_REACH if nodes < row else CHAIN_REACH) / nodes, 1.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """`chain` and `tree` are measured costs, as `nodes:milliseconds` with `/` between; `tree` None: no trees.

    One node is plain decoding. It is chosen if drafting this picture has cost more time per token than plain decoding
    would have, except in every `retry`-th row: guesses are only good if there were some in the passes before. `init` is
    the neighbourhood that the difficulty is read off, as in `trunk`.
    """

    chain: str = "1:10/12:16/18:20/24:24/32:30/64:55"
    tree: str | None = None
    init: Literal["above", "left", "above-right", "both", "previous"] = "above"
    retry: int = 12

    def __post_init__(self) -> None:
        if self.retry < 1:
            raise ConfigError(f"budget:retry={self.retry} must be at least 1.")
        if not any(nodes > 1 for nodes, _ in parse_costs(self.chain)):
            raise ConfigError(f"budget:chain={self.chain} has no size to draft; add pairs such as 8:14.")
        if self.tree:
            parse_costs(self.tree)

    def plan(self, history: History, step: int) -> TreePlan:
        row = step // history.layout.row_stride
        if row % self.retry and self._has_lost_time(history, step):
            return TreePlan(0, 1, 1, 1)
        nodes, is_tree = self.cheapest(self._difficulty(history, step), history.layout.row_stride)
        if is_tree:
            return Trunk(nodes, self.init).plan(history, step)
        return TreePlan(nodes - 1, 1, 1, nodes)

    def cheapest(self, difficulty: float, row: int) -> tuple[int, bool]:
        """Nodes, and whether as a tree, with the least expected time per token; at least two."""
        chain = tuple((nodes, ms) for nodes, ms in parse_costs(self.chain) if nodes > 1)
        return cheapest_size(chain, parse_costs(self.tree) if self.tree else (), difficulty, row)

    def _has_lost_time(self, history: History, step: int) -> bool:
        """Whether the cells that were drafted took longer than plain decoding would have; the more, the surer.

        The first row does not count: nothing is above it that guesses could start from.
        """
        plain = dict(parse_costs(self.chain)).get(1)
        drafted = (history.pass_index[: step + 1] >= 0) & (history.depth[: step + 1] > 0)
        drafted[: history.layout.start + history.layout.row_stride] = False
        rows = drafted.sum() / history.layout.row_stride
        if plain is None or rows < 1:
            return False
        nodes, costs = history.nodes[: step + 1][drafted], parse_costs(self.tree or self.chain)
        spent = np.interp(nodes, [n for n, _ in costs], [ms for _, ms in costs])
        return bool((spent / (history.accepted[: step + 1][drafted] + 1.0)).mean() > (1 + _LOSS / rows) * plain)

    def _difficulty(self, history: History, step: int) -> float:
        """Passes per token of a long chain near `step`, by what passes there accepted."""
        parts = neighbourhood(history, step, self.init)
        total, count = PRIOR_DIFFICULTY * _PRIOR_CELLS, _PRIOR_CELLS
        for part in parts:
            # A wide tree has more nodes than depth; a chain has one more.
            nodes, depth = history.nodes[part].clip(min=1), history.depth[part]
            is_tree = nodes > depth + 1
            seen = 1 / (history.accepted[part] + 1.0)
            chain = seen - np.where(nodes < history.layout.row_stride, SHORT_CHAIN_REACH, CHAIN_REACH) / nodes
            tree = (seen - TREE_REACH / nodes) / TREE_DIFFICULTY
            is_drafted = depth > 0
            total += float((is_tree * tree + ~is_tree * chain)[is_drafted].sum()) / len(parts)
            count += float(is_drafted.sum()) / len(parts)
        return min(max(total / count, 0.02), 1.0)


def cheapest_size(chain: Costs, tree: Costs, difficulty: float, row: int) -> tuple[int, bool]:
    """Nodes, and whether as a tree, with the least milliseconds per token."""
    options = [(ms * passes_per_token(nodes, difficulty, row), nodes, False) for nodes, ms in chain if nodes > 1]
    options += [(ms * passes_per_token(nodes, difficulty, row, is_tree=True), nodes, True) for nodes, ms in tree]
    options += [(ms, 1, False) for nodes, ms in chain if nodes == 1]
    _, nodes, is_tree = min(options)
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
