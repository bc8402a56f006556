"""The `auto` tree: measuring and storing costs of passes, and the policies chosen from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import toy_models

from underdraw.drafters.jacobi import Jacobi
from underdraw.engine.autotune import (
    FixedPlan,
    PassCosts,
    Workload,
    build_tree,
    load_or_measure_costs,
    measure,
    measure_again,
    read_costs,
    resolve_tree,
    tree_within_budget,
)
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.cost import Cost
from underdraw.policies.fixed import Chain
from underdraw.sampling import Sampler


def make_workload(*, captured: bool) -> Workload:
    target = toy_models.target()
    return Workload(
        key=("toy",),
        target=target,
        drafter=toy_models.eagle(target),
        prompts=toy_models.prompts(1),
        sampler=Sampler(toy_models.PLAIN, (0,)),
        guidance=2.0,
        graphs=GraphCache(capture=EagerPass, span_multiple=64) if captured else None,
    )


def test_costs_of_captured_passes_are_measured_per_bucket_and_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workload, file = make_workload(captured=True), tmp_path / "new" / "costs.json"
    costs = load_or_measure_costs(workload, file)
    assert [size for size, _ in costs.curve] == [1, 8, 16, 32, 64, 128]
    assert [width for width, _ in costs.levels] == [1, 4, 12]
    assert all(milliseconds > 0 for _, milliseconds in costs.curve)
    assert [record.levelname for record in caplog.records if str(file) in record.message] == ["WARNING"]
    assert read_costs(workload.name, file) == load_or_measure_costs(workload, file) == costs
    assert read_costs(replace(workload, key=("other",)).name, file) is None


def test_costs_of_eager_passes_are_linear() -> None:
    costs = measure(make_workload(captured=False))
    assert costs.plain > 0 and costs.base > 0 and costs.node > 0 and costs.level >= 0
    assert costs.curve == () and costs.levels == ()


@pytest.mark.parametrize("content", [None, "damaged", "[]", '{"other": {"plain": 1}}'])
def test_measuring_again_replaces_the_stored_costs(tmp_path: Path, content: str | None) -> None:
    workload, file = make_workload(captured=False), tmp_path / "costs.json"
    if content is not None:
        file.write_text(content)
    costs = measure_again(workload, file)
    assert read_costs(workload.name, file) == costs
    assert ("other" in json.loads(file.read_text())) == (content is not None and "other" in content)


def test_file_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    costs = measure_again(make_workload(captured=False), tmp_path / "file" / "costs.json")
    assert costs.plain > 0 and "cannot be written" in caplog.text


def no_workload() -> Workload:
    raise AssertionError("nothing is measured")


def test_tree_is_resolved_without_costs_where_possible() -> None:
    assert build_tree("auto") is None and build_tree("chain:depth=3") == Chain(3)
    assert resolve_tree(Chain(3), Jacobi(), no_workload) == Chain(3)
    assert resolve_tree(None, Jacobi(), no_workload) == Chain(24), "jacobi proposes chains"


@pytest.mark.parametrize(("captured", "policy"), [(True, Adjacency), (False, Cost)])
def test_tree_of_a_trained_drafter_depends_on_costs(
    captured: bool, policy: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERDRAW_CACHE", str(tmp_path))
    workload = make_workload(captured=captured)
    assert isinstance(resolve_tree(None, workload.drafter, lambda: workload), policy)
    assert read_costs(workload.name) is not None


@pytest.mark.parametrize(
    ("plain", "level", "large", "d_max", "nodes"),
    [(4.8, 0.41, 5.9, 6, 64), (0.9, 0.26, 1.4, 3, 16), (4.8, 0.1, 5.9, 10, 64), (1.0, 0.9, 1.1, 1, 64)],
)
def test_tree_within_budget_is_as_large_and_deep_as_pays(
    plain: float, level: float, large: float, d_max: int, nodes: int
) -> None:
    """A level takes less of a plain pass than its probability to be reached, 0.7 to the power of its depth."""
    costs = PassCosts(plain, plain, 0.0, level, ((1, plain), (16, plain), (64, large)), ((1, level), (12, level)))
    policy = tree_within_budget(costs)
    assert isinstance(policy, Adjacency)
    assert (policy.d_max, policy.nodes) == (d_max, nodes)
    assert policy.d_min <= policy.depth <= policy.d_max


def test_fixed_plan_ignores_the_history() -> None:
    plan = TreePlan(2, 1, 1, 3)
    assert FixedPlan(plan).plan(None, 7) == plan  # type: ignore[arg-type]
