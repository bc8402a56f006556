"""Policies that do not look at the history: plain decoding, a chain, and the published static trees."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from underdraw.errors import ConfigError, unknown
from underdraw.history import History
from underdraw.plan import TreePlan

# Child counts of the published trees. "012:3" would read: the node reached by rank 0, then 1, then 2 has 3 children.
TABLES: dict[str, str] = {
    "mc_sim_7b_63": "root:4 0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2",
    "mc_sim_7b_63_balanced": "root:3 0:3 1:3 2:2 00:3 01:2 10:2 11:2 000:3 0000:2",
    "naive_extend_57": (
        "root:5 0:4 1:3 2:3 3:2 4:1 00:4 01:3 02:3 03:2 10:2 11:1 20:1 000:4 001:3 002:2 003:1 010:2 011:1 020:1 "
        "0000:3 0001:2 0010:2 0011:1 0020:1"
    ),
    "medusa_2_7b_63": (
        "root:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1 002:1 010:1"
    ),
    "reverse_balanced_25": "root:3 0:2 1:1 2:1 00:3 01:2 10:1 000:3 001:2 0000:4 0001:3",
}


@dataclass(frozen=True, slots=True)
class NoTree:
    """Plain autoregression through the same loop: nothing is drafted but the tokens that the layout forces."""

    def plan(self, history: History, step: int) -> TreePlan:
        depth = int(history.layout.is_row_end(step + 1))
        return TreePlan(depth, 1, 1, depth + 1)


@dataclass(frozen=True, slots=True)
class Chain:
    """One guess after another, no branches."""

    depth: int = 5

    def __post_init__(self) -> None:
        TreePlan(self.depth, 1, 1, self.depth + 1)

    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan(self.depth, 1, 1, self.depth + 1)


@dataclass(frozen=True, slots=True)
class Static:
    """A tree of one shape: a published table by name, or a JSON file with one list, the parent of every node."""

    shape: str = "naive_extend_57"

    def __post_init__(self) -> None:
        load_shape(self.shape)

    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan.of(load_shape(self.shape))


@functools.lru_cache(maxsize=64)
def load_shape(name: str) -> tuple[int, ...]:
    """Parents of a named table or of a JSON file."""
    if name in TABLES:
        return parents_of(TABLES[name])
    path = Path(name)
    if not path.suffix:
        raise unknown("static tree", name, TABLES)
    try:
        parents = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"tree shape {name!r} cannot be read ({error}); give a JSON list of parents, -1 for the root."
        ) from None
    if not isinstance(parents, list) or not all(isinstance(p, int) for p in parents):
        raise ConfigError(
            f"tree shape {name!r} must be a JSON list of whole numbers: the parent of every node, -1 for the root."
        )
    return TreePlan.of(parents).shape or ()


def parents_of(table: str) -> tuple[int, ...]:
    """The parents that a table of child counts describes, level by level and in order of rank."""
    counts = {"" if path == "root" else path: int(count) for path, count in (item.split(":") for item in table.split())}
    paths, parents = [""], [-1]
    for index, path in enumerate(paths):  # grows while it is read
        for rank in range(counts.get(path, 0)):
            paths.append(path + str(rank))
            parents.append(index)
    return tuple(parents)
