"""The policies of Jacobi trees: trunks that follow their neighbourhood, and sizes within a budget."""

from __future__ import annotations

import pytest

from underdraw.errors import ConfigError
from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.plan import TreePlan, chain_plan
from underdraw.policies.budget import Budget
from underdraw.policies.trunk import Trunk
from underdraw.registry import policies

WIDE = Layout(4, 24, range(4, 12))


def trunk_history(accepted: dict[int, int], depth: int = 40) -> History:
    """A history in which trees with a trunk of `depth` nodes filled some steps and accepted so many of them."""
    history = History(WIDE)
    for step, count in accepted.items():
        history.pass_index[step], history.depth[step], history.accepted[step] = 0, depth, count
    return history


def test_trunk_follows_the_mean_accepted_length_of_its_neighbourhood() -> None:
    """The root is step 50, the next cell 51, the cell above that 27."""
    history = trunk_history({26: 60, **dict.fromkeys(range(27, 39), 2), **dict.fromkeys(range(39, 51), 6)})
    lengths = {
        init: Trunk(init=init, base=12, slope=4).plan(history, 50).depth  # type: ignore[arg-type]
        for init in ("above", "left", "above-right", "both", "previous")
    }
    assert lengths == {"above": 12 + 4 * 4, "left": 36, "above-right": 20, "both": 28, "previous": 36}
    assert Trunk(init="above", base=1, slope=0).plan(history, 50).depth == 12, "not shorter than the shortest"
    assert Trunk(init="above", base=99, slope=0).plan(history, 50).depth == 59, "not longer than the longest"
    assert Trunk(init="above", base=99, longest=30).plan(history, 50) == TreePlan(30, 2, 8, 64)


def test_trunk_without_neighbours_has_its_first_length() -> None:
    assert {Trunk(init=init).plan(History(WIDE), 0).depth for init in ("above", "left", "both", "fixed")} == {40}  # type: ignore[arg-type]
    assert Trunk(init="fixed", base=24).plan(trunk_history(dict.fromkeys(range(1, 50), 30)), 49).depth == 24
    lengths = {Trunk(init="random").plan(History(WIDE, seed=seed), 3).depth for seed in range(200)}
    assert min(lengths) >= 12 and max(lengths) <= 59 and len(lengths) > 20


def test_trunk_by_the_rule_of_the_paper_is_deeper_and_narrower_after_success() -> None:
    policy = Trunk(rule="paper", init="previous", beta=0.2, step=4, shortest=12, longest=59)
    success, failure = trunk_history({50: 8}), trunk_history({50: 7})
    assert policy.plan(success, 50) == TreePlan(44, 2, 4, 64)
    assert policy.plan(failure, 50) == TreePlan(36, 2, 5, 64)
    assert policy.plan(trunk_history({50: 59}, depth=59), 50) == TreePlan(59, 2, 2, 64)
    assert policy.plan(trunk_history({50: 0}, depth=12), 50) == TreePlan(12, 2, 8, 64)


@pytest.mark.parametrize("nodes", [2, 3, 8, 16, 24, 32, 64, 100, 128])
@pytest.mark.parametrize("rule", ["linear", "paper"])
def test_trunk_defaults_suit_every_number_of_nodes(nodes: int, rule: str) -> None:
    for accepted in (0, 5, 60):
        plan = policies.build(f"trunk:nodes={nodes},rule={rule}").plan(trunk_history({50: accepted}), 50)
        assert 1 <= plan.depth < nodes
        assert plan.nodes == nodes or (plan.depth < 3 and plan.branch == 8)


@pytest.mark.parametrize(
    "wrong",
    ["nodes=1", "nodes=129", "shortest=0", "shortest=20,longest=10", "longest=64", "base=-1", "slope=nan", "beta=-0.1",
     "step=0", "ranks=0"],
)  # fmt: skip
def test_trunk_refuses_impossible_options(wrong: str) -> None:
    with pytest.raises(ConfigError):
        policies.build(f"trunk:{wrong}")


# --------------------------------------------------------------------------------------------------------------- budget


def filled(accepted: int, nodes: int, *, depth: int | None = None) -> History:
    """A picture whose first two rows came from passes that all accepted as much."""
    history = History(Layout(24, 24, range(8)))
    history.record_first(0)
    step = 0
    while step < 120:
        plan = TreePlan(nodes - 1 if depth is None else depth, 2, 1 if depth is None else 8, nodes)
        history.record(StepResult(0, 0, step, accepted, plan, (0,) * (accepted + 1), (0,) * accepted, 0.0))
        step += accepted + 1
    return history


def test_budget_drafts_far_where_the_row_above_was_easy_and_little_where_it_was_hard() -> None:
    policy = Budget("1:11/12:24/18:30/24:36/32:45/64:77")
    sizes = [policy.plan(filled(accepted, 24), 96).nodes for accepted in (2, 3, 7, 15)]
    assert sizes == sorted(sizes) and sizes[0] == 12 and sizes[-1] >= 24
    assert policy.plan(History(Layout(24, 24, range(8))), 0).nodes in (12, 18, 24), (
        "the prior, where nothing was drafted yet"
    )


def test_budget_grows_trees_where_nodes_are_nearly_free() -> None:
    policy = Budget("1:4.8/16:5.4/32:5.6/64:6/128:8.6", "32:5.8/64:6.2/128:8.8")
    plan = policy.plan(filled(5, 64, depth=40), 60)
    assert plan.nodes == 64 and plan.branch > 1 and plan == Trunk(64).plan(filled(5, 64, depth=40), 60)


def test_budget_is_plain_decoding_where_nothing_else_pays() -> None:
    policy = Budget("1:10/12:25/24:40")
    rows = [3, 4, 5, 11]
    assert [policy.plan(filled(0, 12), 24 * row).nodes for row in rows] == [1] * 4, "one token for 25 ms"
    assert all(policy.plan(filled(3, 12), 24 * row).nodes > 1 for row in rows), "four tokens for 25 ms"
    assert policy.plan(History(Layout(24, 24, range(8))), 0).nodes == 12, "a first try"
    assert Budget("1:10/12:25/24:40", allowance=0).plan(History(Layout(24, 24, range(8))), 0).nodes == 1


@pytest.mark.parametrize(
    "text",
    ["budget:chain=8", "budget:chain=1:10", "budget:chain=1:10/8:0", "budget:tree=x:1", "budget:tree=1:9/8:12",
     "budget:allowance=2"],
)  # fmt: skip
def test_impossible_budgets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"costs '|budget:"):
        policies.build(text)
    assert policies.build(policies.describe(Budget())) == Budget()


def test_a_single_size_is_used_also_where_row_ends_make_it_plain_decoding() -> None:
    history = History(Layout(4, 4, range(4, 10), row_end=20))
    history.record_first(5)
    assert policies.build("budget:chain=2:12").plan(history, history.layout.start) == chain_plan(1)
