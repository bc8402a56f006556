"""Policies that ignore the history: plain decoding, a chain, and the published static trees."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

from underdraw.errors import ConfigError, unknown
from underdraw.history import History
from underdraw.io import read_json
from underdraw.plan import TreePlan, chain_plan

# Published trees by the number of children of each node; "012:3": the node at ranks 0, 1, 2 below the root has 3.
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


def _branched_chain(nodes: int, levels: int = 3, branch: int = 3) -> str:
    """A full tree of a few levels, and a chain below its first leaf: the fixed tree of SJD-PAC."""
    ranks = "".join(map(str, range(branch)))
    inner = ["".join(path) for level in range(levels) for path in itertools.product(ranks, repeat=level)]
    depth = nodes - sum(branch**level for level in range(levels + 1)) + levels  # of the chain's end
    chain = ["0" * level for level in range(levels, depth)]
    return " ".join([*(f"{path or 'root'}:{branch}" for path in inner), *(f"{path}:1" for path in chain)])


TABLES["sjd_pac_64"] = _branched_chain(64)


@dataclass(frozen=True, slots=True)
class NoTree:
    """Plain autoregressive decoding in the same loop: only tokens that the layout forces are drafted."""

    def plan(self, history: History, step: int) -> TreePlan:
        return chain_plan(int(history.layout.is_row_end(step + 1)))


@dataclass(frozen=True, slots=True)
class Chain:
    """A tree without branches."""

    depth: int = 5

    def __post_init__(self) -> None:
        chain_plan(self.depth)  # checks the value

    def plan(self, history: History, step: int) -> TreePlan:
        return chain_plan(self.depth)


@dataclass(frozen=True, slots=True)
class Static:
    """A fixed tree shape: the name of a published one, or a JSON file with the list of every node's parent."""

    shape: str = "naive_extend_57"

    def __post_init__(self) -> None:
        load_shape(self.shape)  # checks the name or the file

    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan.from_shape(load_shape(self.shape))


@functools.lru_cache(maxsize=64)
def load_shape(name: str) -> tuple[int, ...]:
    """The parents of a published tree or of the tree in a JSON file."""
    if name in TABLES:
        return parse_table(TABLES[name])
    path = Path(name)
    if not path.suffix:
        raise unknown("static tree", name, TABLES)
    try:
        parents = read_json(path, "a tree shape")
    except ConfigError as error:
        raise ConfigError(f"{name!r} is no JSON list of parents, -1 for the root: {error}") from None
    if not isinstance(parents, list) or not all(type(p) is int for p in parents):
        raise ConfigError(
            f"tree shape {name!r} must be a JSON list of whole numbers: the parent of every node, -1 for the root."
        )
    return TreePlan.from_shape(parents).shape or ()


def parse_table(table: str) -> tuple[int, ...]:
    """The parents of the nodes of one of `TABLES`, level by level and in order of rank."""
    counts = {"" if path == "root" else path: int(count) for path, count in (item.split(":") for item in table.split())}
    paths, parents = [""], [-1]
    for index, path in enumerate(paths):  # `paths` grows in the loop
        for rank in range(counts.get(path, 0)):
            paths.append(path + str(rank))
            parents.append(index)
    return tuple(parents)
