"""The running sums of the policy `budget` are those of all cells so far, however often they were extended."""

from __future__ import annotations

import numpy as np
import pytest

from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.plan import TreePlan, chain_plan
from underdraw.policies.budget import Budget
from underdraw.policies.running_sums import PassTable, RunningSums, size_index
from underdraw.policies.trunk import neighbourhood

LAYOUTS = {"grid": Layout(6, 24, range(8)), "row ends": Layout(6, 24, range(4, 12), prologue=(1, 2), row_end=3)}
TABLE = PassTable(*np.random.default_rng(5).uniform(0.1, 0.9, (3, 258)).tolist())
PLANS = (chain_plan(0), chain_plan(1), chain_plan(7), TreePlan(6, 2, 4, 16))
KEEP, PLAIN_MS = 0.97, 0.4


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
@pytest.mark.parametrize("init", ["above", "left", "above-right", "both", "previous"])
def test_sums_equal_those_over_all_cells(layout: Layout, init: str) -> None:
    history, roots = random_history(layout)
    sums, row, start = RunningSums(history, TABLE, PLAIN_MS, KEEP), layout.row_stride, layout.start
    for root in roots:
        sums.extend(history, root)
        cells = range(start, root + 1)
        is_drafted = history.depth[cells] > int(layout.row_end is not None)
        sizes = [size_index(int(history.nodes[cell]), int(history.depth[cell])) for cell in cells]
        first, scale, spent = (np.array(column)[sizes] for column in TABLE)
        passes = 1 / (history.accepted[cells] + 1)
        assert sums.saved_ms == pytest.approx(((PLAIN_MS - spent * passes) * is_drafted).sum())
        weights = KEEP ** np.arange(len(cells))[::-1]
        parts = neighbourhood(history, root, init)
        for part in parts:
            weights[max(part.start - start, 0) : part.stop - start] = 1 / len(parts)
        expected = (weights * is_drafted).sum(), (weights * is_drafted * (passes - first) * scale).sum()
        assert sums.weighted(parts) == pytest.approx(expected)
        last = [cell for cell in cells[-row:] if cell > start]
        repeats = sum(history.tokens[c] in (history.tokens[c - 1], history.tokens[max(c - row, 0)]) for c in last)
        if len(last) == row and last[0] >= start + row:
            assert sums.repeat_share() == pytest.approx(repeats / row)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_plans_do_not_depend_on_when_sums_were_extended(layout: Layout) -> None:
    history, roots = random_history(layout)
    policy = Budget("1:4.3/8:4.7/16:5/32:5.3", "16:5/32:5.6")
    in_order = [policy.plan(history, root) for root in roots]
    alone = []
    for root in reversed(roots):  # an earlier step than that of the sums starts them again
        alone.append(policy.plan(history, root))
    assert alone[::-1] == in_order
    assert len(set(in_order)) > 1
