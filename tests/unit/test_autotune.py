"""The `auto` tree: measuring and storing costs of passes, and the policies chosen from them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import toy_models

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.engine.autotune import (
    FixedPlan,
    PassCosts,
    TimedDecode,
    build_tree,
    load_or_measure_costs,
    load_or_measure_windows,
    measure,
    measure_again,
    measured_batches,
    read_costs,
    read_windows,
    resolve_tree,
    tree_within_budget,
)
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.engine.window_costs import (
    CPU_SIZES,
    GPU_SIZES,
    TREE_SIZES,
    WindowCosts,
    captured_sizes,
    fastest,
    interpolate,
    measure_windows,
)
from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.budget import Budget, cheapest_size, passes_per_token
from underdraw.policies.cost import Cost
from underdraw.policies.fixed import Chain, NoTree
from underdraw.sampling import Sampler


def make_workload(*, captured: bool) -> TimedDecode:
    target = toy_models.target()
    return TimedDecode(
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


def no_workload() -> TimedDecode:
    raise AssertionError("nothing is measured")


def test_tree_is_resolved_without_costs_where_possible() -> None:
    assert build_tree("auto") is None and build_tree("chain:depth=3") == Chain(3)
    assert resolve_tree(Chain(3), Jacobi(), no_workload) == Chain(3)


def window_workload(drafter: Any = None, *, captured: bool = False, batch: int = 1) -> TimedDecode:
    workload = make_workload(captured=captured)
    seeds = range(batch)
    sampler = Sampler(Layout(12, 12, toy_models.PLAIN.codes), seeds)
    return replace(workload, drafter=drafter or JacobiTree(), prompts=toy_models.prompts(batch), sampler=sampler)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("drafter", [Jacobi(), JacobiTree()], ids=["jacobi", "jacobi-tree"])
def test_costs_of_every_window_are_measured_and_stored(drafter: Any, captured: bool, tmp_path: Path) -> None:
    workload, file = window_workload(drafter, captured=captured), tmp_path / "costs.json"
    costs = load_or_measure_windows(workload, file)
    assert [nodes for nodes, _ in costs.chain] == list(GPU_SIZES if captured else CPU_SIZES)
    sizes = [nodes for nodes in TREE_SIZES if nodes in (GPU_SIZES if captured else CPU_SIZES)]
    assert [nodes for nodes, _ in costs.tree] == (sizes if isinstance(drafter, JacobiTree) else [])
    milliseconds = [ms for _, ms in costs.chain]
    assert milliseconds[0] > 0 and milliseconds == sorted(milliseconds)
    assert read_windows(workload.name, file) == costs
    policy = resolve_tree(None, drafter, lambda: workload)
    assert isinstance(policy, Budget)


def test_pictures_smaller_than_a_window_leave_it_out() -> None:
    workload = replace(window_workload(), sampler=Sampler(toy_models.PLAIN, (0,)))
    costs = measure_windows(workload.run, has_trees=True, batch=1, is_captured=False)
    cells = toy_models.PLAIN.stop - toy_models.PLAIN.start
    assert [nodes for nodes, _ in costs.chain] == [nodes for nodes in CPU_SIZES if nodes < cells]
    assert isinstance(costs.policy(), Budget)


@dataclass
class FakeRun:
    """Passes that take as long as a table says, some of them slowed down by other work, and trees of limited depth."""

    milliseconds: Callable[[int], float]
    slowdown: Callable[[int], float] = lambda index: 1.0
    max_depth: int = 127
    passes: int = 0

    def __call__(self, policy: Any) -> Iterator[StepResult]:
        history = History(Layout(64, 64, range(8)))
        for step in range(4000):
            plan = policy.plan(history, step).truncate(self.max_depth)
            self.passes += 1
            seconds = self.milliseconds(plan.nodes) * self.slowdown(self.passes) / 1000
            yield StepResult(step, 0, step, 0, plan, (0,), (), seconds)


def test_busy_machine_is_noticed_and_costs_are_measured_again(tmp_path: Path) -> None:
    def linear(nodes: int) -> float:
        return 10 + nodes

    quiet = measure_windows(FakeRun(linear), has_trees=True, batch=2, is_captured=False)
    assert not quiet.is_busy and quiet.attempts == 1 and quiet.chain[-1] == (64, 74.0)
    busy = FakeRun(linear, slowdown=lambda index: random.Random(index).choice((1, 3, 5)))
    costs = measure_windows(busy, has_trees=True, batch=2, is_captured=False)
    assert costs.is_busy and costs.attempts == 2 and not costs.is_final
    assert fastest(costs, quiet).chain == quiet.chain and not fastest(costs, quiet).is_busy

    workload, file = window_workload(), tmp_path / "costs.json"
    file.write_text(json.dumps({workload.name: asdict(replace(costs, spread=9.0))}))
    again = load_or_measure_windows(workload, file)
    assert again.attempts > costs.attempts and again.chain[0][1] < costs.chain[0][1], "measured again"
    file.write_text(json.dumps({workload.name: asdict(replace(quiet, chain=((1, 3.0), (8, 4.0))))}))
    assert load_or_measure_windows(workload, file).chain == ((1, 3.0), (8, 4.0)), "costs of a quiet machine are kept"


def test_costs_of_drafted_passes_contain_the_time_of_choosing_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_slowly(self: Budget, history: History, step: int) -> TreePlan:
        time.sleep(0.002)
        return TreePlan(1, 1, 1, 2)

    monkeypatch.setattr(Budget, "plan", choose_slowly)
    costs = measure_windows(FakeRun(lambda nodes: 1.0), has_trees=True, batch=1, is_captured=False)
    assert costs.chain[0] == (1, pytest.approx(1.0, abs=0.2)), "plain decoding chooses nothing"
    assert all(ms >= 3 for _, ms in (*costs.chain[1:], *costs.tree))
    batch = measure_windows(FakeRun(lambda nodes: 1.0), has_trees=True, batch=4, is_captured=False)
    assert batch.chain[-1][1] < 2, "a batch has one size for all its passes"


def test_chains_deeper_than_a_gpu_verifies_are_left_out_soon() -> None:
    run = FakeRun(lambda nodes: 5 + nodes / 100, max_depth=63)
    costs = measure_windows(run, has_trees=True, batch=1, is_captured=True)
    assert [nodes for nodes, _ in costs.chain] == [1, 8, 16, 32, 64] and [n for n, _ in costs.tree] == [16, 32, 64, 128]
    assert run.passes < 250


@pytest.mark.parametrize("content", ['{"chain": []}', '{"chain": [[1, 2]], "tree": [], "batch": 1, "spread": 1}', "3"])
def test_damaged_window_costs_are_measured_again(content: str, tmp_path: Path) -> None:
    workload, file = window_workload(), tmp_path / "costs.json"
    file.write_text(f'{{"{workload.name}": {content}}}')
    assert read_windows(workload.name, file) is None
    assert len(load_or_measure_windows(workload, file).chain) > 1


CPU = WindowCosts(tuple((n, 11.6 + 1.02 * n) for n in CPU_SIZES), tuple((n, 12.6 + 1.02 * n) for n in (32, 64)))
H200_7B = WindowCosts(
    ((1, 4.8), (8, 5.3), (16, 5.4), (32, 5.6), (64, 5.99), (128, 8.6)), ((32, 5.8), (64, 6.2), (128, 8.8))
)


def test_windows_shrink_as_batches_grow() -> None:
    sizes = [nodes_of_policy(H200_7B.for_batch(batch).policy()) for batch in (2, 4, 8, 16, 64)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    assert H200_7B.for_batch(2).chain[3] == (32, 5.99), "32 nodes of two images cost what 64 of one do"
    assert H200_7B.for_batch(4).chain[-1] == (128, pytest.approx(8.6 + (8.6 - 5.99) / 64 * 384)), "a straight line"


def nodes_of_policy(policy: Any) -> int:
    return policy.plan(History(Layout(24, 24, range(8))), 0).nodes


def test_captured_batches_are_measured_at_few_sizes_with_small_windows() -> None:
    images = (1, 3, 8, 16, 40, 64, 256)
    captured = [measured_batches(count, Jacobi(), is_captured=True) for count in images]
    assert captured == [(1,), (3,), (4,), (16, 4), (16, 4), (64, 16, 4), (64, 16, 4)]
    assert measured_batches(64, Jacobi(), is_captured=False) == (1,), "nodes of a CPU cost the same in any image"
    assert measured_batches(64, make_workload(captured=True).drafter, is_captured=True) == (4,)
    assert captured_sizes(1) == GPU_SIZES and captured_sizes(4) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert captured_sizes(64) == (1, 2, 4, 8, 16, 32), "no passes that are too large to pay"


def test_many_images_draft_few_tokens_where_caches_take_long_to_read() -> None:
    """7B on an H200: 64 images take 5.7 ms longer than 64 nodes of one image, with one node each or with more."""
    measured = WindowCosts(((1, 11.5), (2, 13.8), (4, 18.4), (8, 28.0)), batch=64)
    assert measured.policy(row=32) == Chain(3)
    scaled = WindowCosts(((1, 4.3), (64, 5.7), (128, 8.1)), batch=1).for_batch(64)
    assert scaled.chain[0][1] < measured.chain[0][1], "nodes alone say nothing about the caches of many images"


def test_costs_choose_between_plain_chain_and_tree() -> None:
    assert isinstance(CPU.policy(), Budget)
    easy, hard, hopeless = (cheapest_size(CPU.chain, CPU.tree, difficulty, 24) for difficulty in (0.05, 0.2, 0.95))
    assert easy[0] > hard[0] > 1 and not hard[1], "few nodes where it is hard and every node costs"
    assert hopeless == (1, False), "plain decoding"
    nearly_free = cheapest_size(H200_7B.chain, H200_7B.tree, 0.15, 32)
    assert nearly_free == (64, True), "a tree of 64 nodes where they are nearly free"
    dear = WindowCosts(tuple((n, 10.0 * n) for n in CPU_SIZES))
    assert isinstance(dear.policy(), NoTree) and isinstance(replace(dear, batch=2).policy(), NoTree), "plain is faster"


@pytest.mark.parametrize("costs", [CPU, H200_7B], ids=["cpu", "h200"])
@pytest.mark.parametrize("difficulty", [0.05, 0.1, 0.15, 0.2, 0.4])
def test_choice_is_within_three_percent_of_the_best_fixed_size(costs: WindowCosts, difficulty: float) -> None:
    """Of all sizes between the measured ones too."""
    nodes, is_tree = cheapest_size(costs.chain, costs.tree, difficulty, 24)
    chosen = interpolate(costs.tree if is_tree else costs.chain, nodes)
    chosen *= passes_per_token(nodes, difficulty, 24, is_tree=is_tree)
    for size in range(2, 65):
        assert chosen <= 1.035 * interpolate(costs.chain, size) * passes_per_token(size, difficulty, 24)


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
