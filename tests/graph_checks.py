"""Checks of captured passes, for replay tapes on a CPU and CUDA graphs on a GPU."""

from __future__ import annotations

from typing import Any

import torch
import toy_models

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.cuda_graphs import GraphCache, GraphRunner
from underdraw.nn.target import DecoderTarget
from underdraw.registry import policies

DRAFTERS = ("forced", "eagle", "eagle-above", "block", "model", "jacobi", "jacobi-tree", "neighbour")
POLICIES = (
    "none",
    "chain:depth=4",
    "static:shape=mc_sim_7b_63",
    "confidence:depth=3,top_k=4,nodes=12",
    "adjacency:init=both,nodes=24",
    "trunk:nodes=16",
)
LAYOUTS = {"plain": toy_models.PLAIN, "row-ends": toy_models.ROW_ENDS}
BATCHES = {"one": (5,), "four": (7, 8, 9, 10)}
# Every drafter with every policy; layouts and batches alternate, so that each drafter and policy gets all of them.
CASES = [
    (drafter, policy, list(BATCHES)[(i + j) % 2], list(LAYOUTS)[(i + j // 2) % 2])
    for i, drafter in enumerate(DRAFTERS)
    for j, policy in enumerate(POLICIES)
]


def make_drafter(name: str, target: DecoderTarget) -> Any:
    return {
        "forced": lambda: Forced(),
        "eagle": lambda: toy_models.eagle(target),
        "eagle-above": lambda: toy_models.eagle(target, above=True, layers=2),
        "block": lambda: toy_models.block(target),
        "model": lambda: SmallModel(target),
        "jacobi": lambda: Jacobi(),
        "jacobi-tree": lambda: JacobiTree(),
        "neighbour": lambda: Neighbour(),
    }[name]()


def count_captured(graphs: GraphCache) -> int:
    """The number of captured passes."""
    return graphs.pass_counts[1]


def check_two_decodes(target: DecoderTarget, graphs: GraphCache, name: str, policy: str, **settings: Any) -> None:
    """Two decodes in the same buffers, with different seeds, give the tokens of plain decoding."""
    drafter, tree = make_drafter(name, target), policies.build(policy)
    for shift in (0, 100):
        shifted = {**settings, "seeds": tuple(seed + shift for seed in settings["seeds"])}
        tokens, _, steps = toy_models.run_decode(target, drafter, tree, graphs=graphs, **shifted)
        assert torch.equal(tokens, toy_models.plain_tokens(target, **shifted))
        assert all(len(step.tokens) >= 1 for step in steps)
    assert len(graphs.runners) == 1, "both decodes use one set of buffers"
    assert count_captured(graphs) >= 1


def buffer_addresses(graphs: GraphCache) -> list[int]:
    """The addresses of the state of every runner."""
    addresses = []
    for runner in graphs.runners.values():
        assert isinstance(runner, GraphRunner)
        cache = runner.target.cache
        addresses += [t.data_ptr() for t in (runner.steps, runner.root, cache.keys, cache.values, cache.length)]
    return addresses
