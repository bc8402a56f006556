"""What captured passes must do, whatever they are captured with: tapes on a CPU, CUDA graphs on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import toy

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.cuda_graphs import GraphCache, GraphRunner
from underdraw.nn.target import DecoderTarget
from underdraw.registry import policies

DRAFTERS = ("forced", "eagle", "eagle-above", "block", "model", "jacobi", "neighbour")
POLICIES = (
    "none",
    "chain:depth=4",
    "static:shape=mc_sim_7b_63",
    "confidence:depth=3,top_k=4,nodes=12",
    "adjacency:init=both,nodes=24",
)
LAYOUTS = {"plain": toy.PLAIN, "row-ends": toy.ROW_ENDS}
BATCHES = {"one": (5,), "four": (7, 8, 9, 10)}
# Every drafter with every policy; layouts and batches are dealt out so that each drafter and policy meets all of them.
CASES = [
    (name, policy, list(BATCHES)[(one + other) % 2], list(LAYOUTS)[(one + other // 2) % 2])
    for one, name in enumerate(DRAFTERS)
    for other, policy in enumerate(POLICIES)
]


def drafter(name: str, of: DecoderTarget) -> Any:
    return {
        "forced": lambda: Forced(),
        "eagle": lambda: toy.eagle(of),
        "eagle-above": lambda: toy.eagle(of, above=True, layers=2),
        "block": lambda: toy.block(of),
        "model": lambda: SmallModel(of),
        "jacobi": lambda: Jacobi(),
        "neighbour": lambda: Neighbour(),
    }[name]()


def captured(graphs: GraphCache) -> int:
    """How many kinds of passes were captured."""
    return sum(run is not None for passes in graphs.runners.values() for run in passes.passes.values())


def check(of: DecoderTarget, graphs: GraphCache, name: str, policy: str, **settings: Any) -> None:
    """Two pictures in turn, the second one in the buffers of the first: the tokens of plain decoding."""
    own, tree = drafter(name, of), policies.build(policy)
    for shift in (0, 100):
        given = {**settings, "seeds": tuple(seed + shift for seed in settings["seeds"])}
        tokens, _, steps = toy.run(of, own, tree, graphs=graphs, **given)
        assert torch.equal(tokens, toy.plain(of, **given))
        assert all(len(step.tokens) >= 1 for step in steps)
    assert len(graphs.runners) == 1, "one set of buffers serves both pictures"
    assert captured(graphs) >= 1


def buffers(graphs: GraphCache) -> list[int]:
    """Where the state of every kept decode lies."""
    found = []
    for passes in graphs.runners.values():
        assert isinstance(passes, GraphRunner)
        cache = passes.target.cache
        found += [t.data_ptr() for t in (passes.steps, passes.root, cache.keys, cache.values, cache.length)]
    return found
