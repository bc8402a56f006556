"""Policies are pure functions of (history, step), adjacency follows its rule, and histories record passes."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_models import TableDrafter, TableTarget, decode_tokens, random_tables

from underdraw.drafters.forced import Forced
from underdraw.errors import ConfigError
from underdraw.history import History, StepResult, TreeRecord
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.confidence import Confidence
from underdraw.policies.cost import Cost
from underdraw.policies.fixed import Chain, NoTree
from underdraw.registry import policies
from underdraw.verifiers.exact import Exact

PLAIN = Layout(3, 3, range(4, 12))
ROW_ENDS = Layout(2, 3, range(4, 8), prologue=(1,), row_end=9, epilogue=(2,))
SPECS = (
    "none",
    "chain:depth=4",
    "static:shape=mc_sim_7b_63",
    "confidence",
    "adjacency",
    "adjacency:init=vertical",
    "adjacency:init=both",
    "adjacency:init=random",
    "cost",
    "cost:plain=5,base=20",
    "trunk",
    "trunk:init=both,nodes=24",
    "trunk:init=random,nodes=8",
    "trunk:rule=paper,init=left",
    "budget",
    "budget:tree=8:10.5/16:11,init=both",
)


def set_cells(history: History, cells: dict[tuple[int, int], tuple[int, int, int]]) -> None:
    """Record trees of (depth, width, accepted) for some cells."""
    for index, (cell, state) in enumerate(cells.items()):
        step = history.layout.step(*cell)
        history.tokens[step], history.pass_index[step] = history.layout.codes.start, index
        history.depth[step], history.width[step], history.accepted[step] = state


@st.composite
def histories(draw: Any) -> History:
    """A history with trees in some of its cells."""
    history = History(draw(st.sampled_from([PLAIN, ROW_ENDS])), seed=draw(st.integers(0, 2**62 - 1)))
    layout = history.layout
    cells = [(row, col) for row in range(layout.height) for col in range(layout.width)]
    depth = st.integers(0, 12)
    state = st.tuples(depth, st.integers(1, 14), depth).map(lambda s: (s[0], s[1], min(s[0], s[2])))
    set_cells(history, draw(st.dictionaries(st.sampled_from(cells), state)))
    return history


# ----------------------------------------------------------------------------------------------------------- purity


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(history=histories(), data=st.data())
def test_policies_are_pure_functions(spec: str, history: History, data: Any) -> None:
    policy = policies.build(spec)
    step = data.draw(st.integers(history.layout.start, history.layout.stop - 2))
    before = copy.deepcopy(history)
    state = np.random.get_state()[1].tolist()  # type: ignore[index]
    plan = policy.plan(history, step)
    policy.plan(before, history.layout.start)
    assert policy.plan(before, step) == plan, "other calls change nothing"
    assert policies.build(spec).plan(history, step) == plan
    assert np.random.get_state()[1].tolist() == state, "no global randomness"  # type: ignore[index]
    for name in ("tokens", "pass_index", "depth", "width", "nodes", "accepted", "rank"):
        assert np.array_equal(getattr(history, name), getattr(before, name))
    assert (history.seed, history.passes, history.seconds) == (before.seed, before.passes, before.seconds)


@pytest.mark.parametrize("init", ["horizontal", "vertical", "both", "random", "previous"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(history=histories(), data=st.data())
def test_adjacency_plans_come_from_a_finite_set(init: Any, history: History, data: Any) -> None:
    """Whatever the history, depth and width stay within their bounds and the number of nodes is fixed."""
    policy = Adjacency(init=init, d_min=2, d_max=6, k_min=3, k_max=7, depth=4, width=5, nodes=20, l_d=3, l_k=2)
    step = data.draw(st.integers(history.layout.start, history.layout.stop - 2))
    plan = policy.plan(history, step)
    assert plan in {TreePlan(d, k, k, 20) for d in range(2, 7) for k in range(3, 8)}


# -------------------------------------------------------------------------------------------------------- adjacency


@dataclass(frozen=True)
class Case:
    """The root's cell, the trees of the cells around it, and the expected (depth, width)."""

    name: str
    init: Any
    root: tuple[int, int]
    cells: dict[tuple[int, int], tuple[int, int, int]]
    expected: tuple[int, int]


LEFT, ABOVE, RIGHT, ROOT = (1, 0), (0, 1), (0, 2), (1, 1)
CASES = [
    # With l_d = 2, l_k = 3, beta = 0.5, depth 2..10, width 2..12, starting from 5 and 8.
    Case("half accepted: deeper, narrower", "horizontal", ROOT, {LEFT: (4, 6, 2)}, (6, 3)),
    Case("all accepted: deeper, narrower", "horizontal", ROOT, {LEFT: (4, 6, 4)}, (6, 3)),
    Case("a quarter accepted: shallower, wider", "horizontal", ROOT, {LEFT: (4, 6, 1)}, (2, 9)),
    Case("just below half: shallower, wider", "horizontal", ROOT, {LEFT: (7, 6, 3)}, (5, 9)),
    Case("nothing accepted: shallower, wider", "horizontal", ROOT, {LEFT: (6, 4, 0)}, (4, 7)),
    Case("deepest and narrowest", "horizontal", ROOT, {LEFT: (9, 3, 9)}, (10, 2)),
    Case("shallowest and widest", "horizontal", ROOT, {LEFT: (3, 11, 0)}, (2, 12)),
    Case("a tree without depth counts as accepted", "horizontal", ROOT, {LEFT: (0, 8, 0)}, (2, 5)),
    Case("horizontal uses left only", "horizontal", ROOT, {LEFT: (4, 6, 4), ABOVE: (9, 2, 0), ROOT: (9, 2, 0)}, (6, 3)),
    Case("vertical uses above only", "vertical", ROOT, {LEFT: (9, 2, 0), ABOVE: (4, 6, 4), ROOT: (9, 2, 0)}, (6, 3)),
    Case("both: the mean of three", "both", ROOT, {LEFT: (4, 6, 4), ABOVE: (6, 7, 0), RIGHT: (8, 8, 8)}, (8, 4)),
    Case("both: the mean of the rates", "both", ROOT, {LEFT: (4, 6, 4), ABOVE: (6, 7, 0), RIGHT: (8, 8, 0)}, (4, 10)),
    Case("both: without above-right", "both", (1, 2), {(1, 1): (4, 6, 0), (0, 2): (6, 8, 0)}, (3, 10)),
    Case("both: the first row has only left", "both", (0, 1), {(0, 0): (4, 6, 0), (0, 1): (9, 3, 9)}, (2, 9)),
    Case("previous uses no neighbour", "previous", ROOT, {LEFT: (9, 2, 0), ROOT: (4, 6, 4)}, (6, 3)),
    Case("left edge: the previous tree", "horizontal", (1, 0), {(0, 2): (4, 6, 0), (1, 0): (5, 5, 5)}, (7, 2)),
    Case("top edge: the previous tree", "vertical", (0, 2), {(0, 1): (4, 6, 0), (0, 2): (5, 5, 0)}, (3, 8)),
    Case("a neighbour without a tree", "horizontal", (0, 1), {(0, 1): (6, 6, 0)}, (4, 9)),
    Case("both at the corner: the previous tree", "both", (0, 0), {(0, 0): (6, 6, 6)}, (8, 3)),
    Case("the first cell: the defaults, as if half accepted", "horizontal", (0, 0), {}, (7, 5)),
    Case("the first cell, vertical", "vertical", (0, 0), {}, (7, 5)),
    Case("the first cell, both", "both", (0, 0), {}, (7, 5)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_adjacency_follows_the_rule(case: Case) -> None:
    history = History(PLAIN)
    set_cells(history, case.cells)
    plan = Adjacency(init=case.init, l_d=2, l_k=3).plan(history, PLAIN.step(*case.root))
    assert (plan.depth, plan.width) == case.expected
    assert plan == TreePlan(plan.depth, plan.width, plan.width, 59)


@pytest.mark.parametrize(("beta", "expected"), [(0.0, (5, 7)), (0.25, (5, 7)), (0.26, (3, 9)), (1.0, (3, 9))])
def test_beta_is_the_acceptance_rate_that_makes_a_tree_deeper(beta: float, expected: tuple[int, int]) -> None:
    history = History(PLAIN)
    set_cells(history, {LEFT: (4, 8, 1)})
    plan = Adjacency(beta=beta).plan(history, PLAIN.step(*ROOT))
    assert (plan.depth, plan.width) == expected


def test_row_end_as_root_starts_from_the_previous_tree() -> None:
    history = History(ROW_ENDS)
    step = ROW_ENDS.step(0, 2) + 1
    assert Adjacency().plan(history, step) == TreePlan(6, 7, 7, 59)
    history.pass_index[step], history.depth[step], history.width[step], history.accepted[step] = 3, 8, 4, 0
    assert Adjacency().plan(history, step) == TreePlan(7, 5, 5, 59)


def test_random_init_depends_on_seed_and_step_only() -> None:
    policy = Adjacency(init="random")
    empty, full = History(PLAIN, seed=3), History(PLAIN, seed=3)
    set_cells(full, {LEFT: (9, 3, 9), ROOT: (2, 2, 0)})
    steps = range(PLAIN.stop - 1)
    assert [policy.plan(empty, step) for step in steps] == [policy.plan(full, step) for step in steps]
    seen = {policy.plan(History(PLAIN, seed=seed), step) for seed in range(40) for step in steps}
    assert {plan.depth for plan in seen} == set(range(2, 11)), "every depth occurs"
    assert {plan.width for plan in seen} == set(range(2, 13)), "every width occurs"


# --------------------------------------------------------------------------------------------------- fixed policies


@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
def test_no_tree_drafts_forced_tokens_only(layout: Layout) -> None:
    """Plain decoding: one code per pass, and row ends cost no pass."""
    for step in range(layout.start, layout.stop - 1):
        depth = int(layout.cell(step + 1) is None)
        assert NoTree().plan(History(layout), step) == TreePlan(depth, 1, 1, depth + 1)
    target, draft = random_tables(layout, seed=0)
    for drafter in (Forced(), TableDrafter(draft)):
        _, done = decode_tokens(TableTarget(target), drafter, NoTree(), Exact(), layout, [0, 1])
        assert [history.passes for history in done] == [layout.cells - 1] * 2


def test_plans_of_policies_without_history() -> None:
    history = History(PLAIN)
    assert Confidence().plan(history, 0) == TreePlan(5, 10, 10, 59)
    assert Confidence(depth=3, top_k=4, nodes=20).plan(history, 4) == TreePlan(3, 4, 4, 20)
    assert Chain(depth=7).plan(history, 0) == TreePlan(7, 1, 1, 8)


# ---------------------------------------------------------------------------------------------------------- history


def example_history() -> History:
    """Steps 0: prologue; 1-3, 5-7: cells; 4, 8: row ends; 9: epilogue. Three passes after the first token."""
    history = History(ROW_ENDS)
    history.record_first(5)
    history.record(StepResult(0, 0, 1, 1, TreePlan(3, 2, 2, 7), (6, 7), (1,), 0.5))
    history.record(StepResult(1, 0, 3, 2, TreePlan(2, 4, 4, 9), (9, 4, 5), (0, 0), 0.25))
    history.record(StepResult(2, 0, 6, 0, TreePlan(0, 1, 1, 1), (7,), (), 0.125))
    return history


def test_history_records_passes() -> None:
    history = example_history()
    assert history.tokens.tolist() == [1, 5, 6, 7, 9, 4, 5, 7, 9, 2]
    assert history.pass_index.tolist() == [-2, -2, 0, 0, 1, 1, 1, 2, -2, -2]
    assert history.depth.tolist() == [0, 0, 3, 3, 2, 2, 2, 0, 0, 0]
    assert history.width.tolist() == [0, 0, 2, 2, 4, 4, 4, 1, 0, 0]
    assert history.nodes.tolist() == [0, 0, 7, 7, 9, 9, 9, 1, 0, 0]
    assert history.accepted.tolist() == [0, 0, 1, 1, 2, 2, 2, 0, 0, 0]
    assert history.rank.tolist() == [-1, -1, 1, -1, 0, 0, -1, -1, -1, -1]


def test_history_means() -> None:
    """Six raster tokens in three passes; the token of the prefill is not counted."""
    history = example_history()
    assert history.passes == 3
    assert history.tokens_per_pass == 2.0
    assert history.mean_depth == pytest.approx(5 / 3)
    assert history.mean_nodes == pytest.approx(17 / 3)
    assert history.seconds == 0.875
    assert history.done


def test_history_grids() -> None:
    history = example_history()
    assert history.grid("pass_index").tolist() == [[-2, 0, 0], [1, 1, 2]]
    assert history.grid("accepted").tolist() == [[0, 1, 1], [2, 2, 0]]
    assert history.grid("depth").tolist() == [[0, 3, 3], [2, 2, 0]]
    assert history.grid("tokens").tolist() == [[5, 6, 7], [4, 5, 7]]


def test_history_tree_at_a_step() -> None:
    history = example_history()
    assert history.tree_at(2) == history.tree_at(3) == TreeRecord(3, 2, 1)
    assert history.tree_at(4) == TreeRecord(2, 4, 2)
    assert history.tree_at(7) == TreeRecord(0, 1, 0)
    assert [history.tree_at(step) for step in (-1, 0, 1, 8, 9, 10)] == [None] * 6


def test_history_next_step_and_done() -> None:
    history = History(ROW_ENDS)
    assert (history.next_step, history.done, history.passes) == (1, False, 0)
    assert math.isnan(history.tokens_per_pass)
    assert math.isnan(history.mean_depth)
    history.record_first(5)
    assert (history.next_step, history.done) == (2, False)
    history.record(StepResult(0, 0, 1, 1, TreePlan(3, 2, 2, 7), (6, 7), (1,), 0.5))
    assert (history.next_step, history.done) == (4, False)
    assert history.tree_at(4) is None
    assert example_history().next_step == ROW_ENDS.steps


def test_image_of_one_cell_is_done_after_the_prefill() -> None:
    history = History(Layout(1, 1, range(4, 8), row_end=9, epilogue=(2, 3)))
    history.record_first(6)
    assert history.done
    assert history.tokens.tolist() == [6, 9, 2, 3]


@pytest.mark.parametrize(
    ("record", "acceptance_rate"), [((4, 1, 1), 0.25), ((4, 9, 4), 1.0), ((0, 1, 0), 1.0), ((5, 1, 0), 0.0)]
)
def test_acceptance_rate_is_accepted_over_depth(record: tuple[int, int, int], acceptance_rate: float) -> None:
    assert TreeRecord(*record).acceptance_rate == acceptance_rate


@pytest.mark.parametrize(
    "module", ["underdraw", "underdraw.history", "underdraw.policies.adjacency", "underdraw.policies.confidence",
               "underdraw.policies.fixed", "underdraw.policies.trunk", "underdraw.registry", "underdraw.layout",
               "underdraw.plan"],
)  # fmt: skip
def test_imports_without_torch(module: str) -> None:
    """Policies and records never import torch, and `import underdraw` stays fast."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_cost_min_probability_is_node_cost_over_nearby_token_cost() -> None:
    """Nearby: the last cells, and the cells above the next ones."""
    policy = Cost(plain=20, base=20, node=1, level=0.5, reach=2, retry=4)
    history = History(Layout(3, 8, range(4, 12)))
    assert policy.plan(history, 0).min_probability == pytest.approx(1 / 10)  # no data yet: half a plain pass
    for step, (depth, nodes, accepted) in {
        9: (4, 8, 3),
        10: (4, 8, 3),
        3: (2, 3, 0),
        4: (2, 3, 0),
        0: (9, 9, 9),
    }.items():
        history.pass_index[step], history.depth[step] = step, depth
        history.nodes[step], history.accepted[step] = nodes, accepted
    left, above = (20 + 8 + 2) / 4, 20 + 3 + 1
    token_cost = (2 * left + 2 * above) / 4  # steps 9 and 10, and steps 3 and 4 above the next ones
    assert policy.plan(history, 10).min_probability == pytest.approx(round(1 / token_cost, 3))


def test_cost_skips_trees_that_do_not_pay_and_retries() -> None:
    policy = Cost(plain=10, base=20, node=1, level=0, reach=2, retry=4)
    history = History(Layout(1, 12, range(4, 12)))
    for step in range(1, 12):
        history.pass_index[step], history.depth[step], history.nodes[step] = step, 1, 2  # nothing was accepted
    assert [policy.plan(history, step).depth for step in range(4, 9)] == [12, 0, 0, 0, 12]


@pytest.mark.parametrize("option", ["plain=0", "node=-1", "base=nan", "level=-0.1", "retry=0", "reach=0", "nodes=3"])
def test_cost_rejects_invalid_options(option: str) -> None:
    with pytest.raises(ConfigError):
        policies.build(f"cost:{option}")
