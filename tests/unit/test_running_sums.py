"""The sums that `budget` and `trunk` read are those of all cells so far, however often they were extended."""

from __future__ import annotations

import numpy as np
import pytest

from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.plan import TreePlan, chain_plan
from underdraw.policies.budget import Budget
from underdraw.policies.running_sums import AcceptedSums, PassTable, RunningSums, size_index
from underdraw.policies.trunk import Trunk
from underdraw.protocols import TreePolicy

LAYOUTS = {"grid": Layout(6, 24, range(8)), "row ends": Layout(6, 24, range(4, 12), prologue=(1, 2), row_end=3)}
COLUMNS = np.random.default_rng(5).uniform(0.1, 0.9, (3, 258))  # by size: first, scale and spent of a PassTable
INITS = ("above", "left", "above-right", "both", "previous")
PLANS = (chain_plan(0), chain_plan(1), chain_plan(7), TreePlan(6, 2, 4, 16))
KEEP = 0.97


def random_history(layout: Layout) -> tuple[History, list[int]]:
    """An image of random passes, and the step of every root."""
    random, history = np.random.default_rng(3), History(layout)
    history.record_first(4)
    step, roots = layout.start, []
    while step + 1 < layout.stop:
        roots.append(step)
        plan = PLANS[random.integers(len(PLANS))]
        accepted = min(int(random.integers(plan.depth + 1)), layout.stop - step - 2)
        tokens = tuple(4 + random.integers(2, size=accepted + 1))
        history.record(StepResult(0, 0, step, accepted, plan, tokens, (0,) * accepted, 0.0))
        step += accepted + 1
    return history, roots


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("plain_ms", [0.4, 0.05])  # drafts pay, or do not
def test_sums_equal_those_over_all_cells(layout: Layout, init: str, plain_ms: float) -> None:
    history, roots = random_history(layout)
    row, start, forced_depth = layout.row_stride, layout.start, int(layout.row_end is not None)
    sums = RunningSums(history, PassTable(*COLUMNS.tolist(), plain_ms, forced_depth=forced_depth), KEEP)
    for root in roots:
        sums.extend(history, root)
        cells = range(start, root + 1)
        is_drafted = history.depth[cells] > forced_depth
        sizes = [size_index(int(history.nodes[cell]), int(history.depth[cell])) for cell in cells]
        first, scale, spent = COLUMNS[:, sizes]
        passes = 1 / (history.accepted[cells] + 1)
        assert sums.saved_ms == pytest.approx(((plain_ms - spent * passes) * is_drafted).sum())
        weights = KEEP ** np.arange(len(cells))[::-1]
        parts = sums.neighbourhood(init)
        for first_cell, last_cell in parts:
            weights[first_cell:last_cell] = 1 / len(parts)
        weights[: sums.origin] = 0
        expected = (weights * is_drafted).sum(), (weights * is_drafted * (passes - first) * scale).sum()
        assert sums.weighted(parts) == pytest.approx(expected)
        last = [cell for cell in cells[-row:] if cell > start]
        repeats = sum(history.tokens[c] in (history.tokens[c - 1], history.tokens[max(c - row, 0)]) for c in last)
        if len(last) == row and last[0] >= start + row:
            assert sums.repeat_share() == pytest.approx(repeats / row)
    assert (sums.origin > 0) is (plain_ms < 0.1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("init", INITS)
def test_mean_accepted_length_is_that_of_the_cells_nearby(layout: Layout, init: str) -> None:
    history, roots = random_history(layout)
    sums, row = AcceptedSums(history), layout.row_stride
    for root in roots:
        sums.extend(history, root)
        above, stop = root + 1 - row, root + 1
        near = {
            "above": [range(above, stop)],
            "left": [range(stop - 12, stop)],
            "above-right": [range(above, above + row // 2)],
            "both": [range(above, above + row // 2), range(stop - 12, stop)],
            "previous": [range(root, stop)],
        }
        cells = [[c for c in part if c >= 0 and history.pass_index[c] >= 0] for part in near[init]]
        means = [float(history.accepted[part].mean()) for part in cells if part]
        assert sums.mean_accepted(sums.neighbourhood(init)) == (sum(means) / len(means) if means else None)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "policy",
    [Budget("1:4.3/8:4.7/16:5/32:5.3", "16:5/32:5.6"), Trunk(), Trunk(24, init="both"), Trunk(rule="paper")],
    ids=["budget", "trunk", "trunk, both", "trunk, paper"],
)
def test_plans_do_not_depend_on_when_sums_were_extended(layout: Layout, policy: TreePolicy) -> None:
    history, roots = random_history(layout)
    in_order = [policy.plan(history, root) for root in roots]
    alone = []
    for root in reversed(roots):  # an earlier step than that of the sums starts them again
        alone.append(policy.plan(history, root))
    assert alone[::-1] == in_order
    assert len(set(in_order)) > 1
