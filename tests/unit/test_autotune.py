"""Costs of passes: measured once and stored, and the trees that follow from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import toy_models

from underdraw.engine.autotune import PassCosts, Workload, load_or_measure_costs, read_costs, tree_within_budget
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.policies.adjacency import Adjacency
from underdraw.sampling import Sampler


def test_costs_of_captured_passes_are_measured_once_and_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, file = toy_models.target(), tmp_path / "costs.json"
    graphs, sampler = GraphCache(capture=EagerPass, span_multiple=64), Sampler(toy_models.PLAIN, (0,))
    workload = Workload(("toy",), target, toy_models.eagle(target), toy_models.prompts(1), sampler, 2.0, graphs)
    costs = load_or_measure_costs(workload, file)
    assert [record.message for record in caplog.records if str(file) in record.message], "the log names the file"
    assert [size for size, _ in costs.curve] == [1, 8, 16, 32, 64, 128]
    assert [width for width, _ in costs.levels] == [1, 4, 12]
    assert all(milliseconds > 0 for _, milliseconds in costs.curve)
    assert read_costs(workload.name, file) == load_or_measure_costs(workload, file) == costs
    assert read_costs(replace(workload, key=("other",)).name, file) is None


@pytest.mark.parametrize(
    ("plain", "level", "large", "deepest", "nodes"),
    [(4.8, 0.41, 5.9, 6, 64), (0.9, 0.26, 1.4, 3, 16), (4.8, 0.1, 5.9, 10, 64), (1.0, 0.9, 1.1, 1, 64)],
)
def test_tree_size_follows_from_costs(plain: float, level: float, large: float, deepest: int, nodes: int) -> None:
    """The last level costs less of a plain pass than its probability to be reached, 0.7 ** depth."""
    costs = PassCosts(plain, plain, 0.0, level, ((1, plain), (16, plain), (64, large)), ((1, level), (12, level)))
    policy = tree_within_budget(costs)
    assert isinstance(policy, Adjacency)
    assert (policy.d_max, policy.nodes) == (deepest, nodes)
    assert policy.d_min <= policy.depth <= policy.d_max
