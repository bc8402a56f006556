"""Tree plans and shapes: truncation, fixed shapes, published tables, bucketing, covering plans."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underdraw.errors import ConfigError
from underdraw.plan import MAX_EXPANDED, MAX_NODES, TreePlan, TreeShape, covering_plan
from underdraw.policies.fixed import TABLES, Static, load_shape

FAST = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def plans(draw: Any) -> TreePlan:
    """Any valid plan, the largest included."""
    depth = draw(st.integers(0, 40))
    width = draw(st.integers(1, min(40, MAX_EXPANDED // max(depth, 1))))
    return TreePlan(depth, width, draw(st.integers(1, 40)), draw(st.integers(depth + 1, MAX_NODES)))


@st.composite
def shapes(draw: Any, by_level: bool = True) -> tuple[int, ...]:
    """Parents of every node, level by level, or in any order that puts a parent before its children."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, 30))):
        parents.append(draw(st.integers(max(parents[-1], 0) if by_level else 0, node - 1)))
    return tuple(parents)


def paths(parents: tuple[int, ...]) -> set[tuple[int, ...]]:
    """A shape independent of node order: the ranks on the path to each node."""
    ranks: Counter[int] = Counter()
    rank_paths: list[tuple[int, ...]] = []
    for parent in parents:
        rank_paths.append(() if parent < 0 else (*rank_paths[parent], ranks[parent]))
        ranks[parent] += 1
    return set(rank_paths)


@FAST
@given(shapes(by_level=False))
def test_shape_has_depths_ranks_and_levels(parents: tuple[int, ...]) -> None:
    shape = TreeShape.from_parents(parents)
    assert shape.depths[0] == shape.ranks[0] == 0
    for node, parent in enumerate(parents[1:], start=1):
        assert shape.depths[node] == shape.depths[parent] + 1
        assert shape.ranks[node] == sum(other == parent for other in parents[:node])
    assert sorted(node for level in shape.levels for node in level) == list(range(len(parents)))
    assert all(shape.depths[node] == depth for depth, level in enumerate(shape.levels) for node in level)


@FAST
@given(shapes(by_level=False))
def test_plan_from_shape(parents: tuple[int, ...]) -> None:
    plan, shape = TreePlan.from_shape(parents), TreeShape.from_parents(parents)
    assert plan.nodes == len(parents)
    assert plan.depth == max(shape.depths)
    assert plan.branch == max(max(Counter(parents[1:]).values(), default=1), 1)
    assert plan.width >= max(len({parents[n] for n in level}) for level in shape.levels)
    assert plan.shape is not None
    assert paths(plan.shape) == paths(parents)


def check_truncated_shape(plan: TreePlan, depth: int) -> None:
    assert plan.shape is not None
    truncated = plan.truncate(depth)
    assert truncated.shape is not None
    assert paths(truncated.shape) == {path for path in paths(plan.shape) if len(path) <= depth}
    assert truncated.nodes == len(truncated.shape)
    assert truncated.depth == min(depth, plan.depth)


@FAST
@given(shapes(), st.integers(0, 8))
def test_truncated_shape_keeps_its_upper_levels(parents: tuple[int, ...], depth: int) -> None:
    check_truncated_shape(TreePlan.from_shape(parents), depth)


@pytest.mark.parametrize("parents", [(-1, 0, 1, 2, 0, 4), (-1, 0, 1, 2, 0, 0, 4)])
def test_truncated_shape_with_nodes_in_any_order(parents: tuple[int, ...]) -> None:
    """A shape from a file may list its nodes depth first."""
    check_truncated_shape(TreePlan.from_shape(parents), 2)


@FAST
@given(plans(), st.integers(0, 50))
def test_truncated_plan_has_only_nodes_that_fit(plan: TreePlan, depth: int) -> None:
    truncated = plan.truncate(depth)
    assert truncated.depth == min(plan.depth, depth)
    assert (truncated.width, truncated.branch) == (plan.width, plan.branch)
    level_size, most_nodes = 1, 1
    for _ in range(truncated.depth):
        level_size = min(level_size, plan.width) * plan.branch
        most_nodes += level_size
    assert truncated.nodes == min(plan.nodes, most_nodes) if depth < plan.depth else truncated == plan
    assert truncated.truncate(depth) == truncated


@pytest.mark.parametrize(
    ("plan", "expanded"),
    [
        (TreePlan(0, 1, 1, 1), 0),
        (TreePlan(5, 1, 1, 6), 5),
        (TreePlan(3, 10, 10, 59), 1 + 10 + 10),
        (TreePlan(4, 4, 2, 20), 1 + 2 + 4 + 4),
        (TreePlan.from_shape((-1, 0, 0, 1, 1, 3)), 3),
        (TreePlan(3, 8, 6, 5, min_probability=0.1), 5),
        (TreePlan(0, 8, 6, 1, min_probability=0.1), 1),
    ],
)
def test_expanded_nodes(plan: TreePlan, expanded: int) -> None:
    """The root, then per level all nodes up to the width; in a shape, the nodes with children.

    With a min_probability there are at most `nodes`, and one level that turns out empty.
    """
    assert plan.expanded == expanded
    assert plan.levels == plan.depth + (plan.min_probability > 0)


@pytest.mark.parametrize(
    ("plan", "nodes"),
    [
        (TreePlan(6, 2, 2, 59), 1 + 2 + 4 + 4 + 4 + 4 + 4),
        (TreePlan(2, 6, 6, 59), 1 + 6 + 36),
        (TreePlan(1, 8, 3, 128), 4),
        (TreePlan(0, 1, 1, 5), 1),
        (TreePlan(6, 2, 2, 20), 20),
    ],
)
def test_plan_has_no_more_nodes_than_its_levels_hold(plan: TreePlan, nodes: int) -> None:
    assert plan.nodes == nodes


@FAST
@given(plans())
def test_bucketed_plan_is_at_least_as_large(plan: TreePlan) -> None:
    bucketed = plan.bucketed()
    assert bucketed.depth == plan.depth
    assert bucketed.nodes >= plan.nodes
    assert bucketed.width >= plan.width
    assert bucketed.branch >= plan.branch


def check_fixed_shape(plan: TreePlan) -> None:
    fixed = plan.with_fixed_shape()
    assert fixed.shape is not None
    shape = TreeShape.from_parents(fixed.shape)
    assert fixed.nodes == len(fixed.shape) <= plan.nodes
    assert fixed.depth == plan.depth
    assert fixed.branch <= plan.branch
    assert list(shape.depths) == sorted(shape.depths), "level by level"
    for level in shape.levels:
        assert len({fixed.shape[node] for node in level}) <= plan.width, "the width limit holds"
    assert fixed.with_fixed_shape() == fixed


@FAST
@given(plans().filter(lambda plan: plan.nodes <= 40 and plan.depth * plan.nodes <= MAX_EXPANDED))
def test_fixed_shape_is_within_the_plan(plan: TreePlan) -> None:
    check_fixed_shape(plan)


@pytest.mark.parametrize("plan", [TreePlan(7, 11, 4, 128), TreePlan(10, 12, 12, 128), TreePlan(7, 11, 16, 128)])
def test_largest_plans_have_a_fixed_shape(plan: TreePlan) -> None:
    check_fixed_shape(plan)


@FAST
@given(st.integers(1, 5), st.integers(1, 4))
def test_fixed_shape_uses_all_nodes(depth: int, branch: int) -> None:
    full = sum(branch**level for level in range(depth + 1))
    nodes = max(min(full, 40), depth + 1)
    assert TreePlan(depth, 40, branch, nodes).with_fixed_shape().nodes == min(nodes, full)


# Nodes without the root, leaves, and nodes of each depth, as published.
PUBLISHED = {
    "mc_sim_7b_63": (25, 15, [4, 8, 8, 3, 2]),
    "mc_sim_7b_63_balanced": (25, 16, [3, 8, 9, 3, 2]),
    "naive_extend_57": (57, 33, [5, 13, 16, 14, 9]),
    "medusa_2_7b_63": (63, 42, [10, 23, 23, 7]),
    "reverse_balanced_25": (25, 15, [3, 4, 6, 5, 7]),
}


def test_published_tables_are_complete() -> None:
    assert set(TABLES) == {*PUBLISHED, "sjd_pac_64"}  # SJD-PAC's window, which is no table of EAGLE


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_table_sizes(name: str) -> None:
    nodes, leaves, per_depth = PUBLISHED[name]
    parents = load_shape(name)
    shape = TreeShape.from_parents(parents)
    assert len(parents) - 1 == nodes
    assert len(set(range(len(parents))) - set(parents)) == leaves
    assert [len(level) for level in shape.levels[1:]] == per_depth
    assert list(shape.depths) == sorted(shape.depths), "level by level, as the published tables are ordered"
    assert (0,) * len(per_depth) in paths(parents), "the all-zeros path is among the deepest"
    plan = Static(name).plan(None, 0)  # type: ignore[arg-type]
    assert (plan.nodes, plan.depth, plan.shape) == (nodes + 1, len(per_depth), parents)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_published_tables_can_be_truncated(name: str, depth: int) -> None:
    check_truncated_shape(TreePlan.from_shape(load_shape(name)), depth)


# Number of children of every inner node, as published; a node is named by the ranks on the path to it.
CHILDREN = {
    "mc_sim_7b_63": "root 4, 0 3, 1 2, 2 2, 3 1, 00 3, 01 2, 02 2, 10 1, 000 3, 0000 2",
    "mc_sim_7b_63_balanced": "root 3, 0 3, 1 3, 2 2, 00 3, 01 2, 10 2, 11 2, 000 3, 0000 2",
    "naive_extend_57": "root 5, 0 4, 1 3, 2 3, 3 2, 4 1, 00 4, 01 3, 02 3, 03 2, 10 2, 11 1, 20 1, 000 4, 001 3, "
    "002 2, 003 1, 010 2, 011 1, 020 1, 0000 3, 0001 2, 0010 2, 0011 1, 0020 1",
    "medusa_2_7b_63": "root 10, 0 10, 1 5, 2 2, 3 2, 4 1, 5 1, 6 1, 7 1, 00 9, 01 4, 02 2, 03 1, 04 1, 05 1, 10 3, "
    "11 1, 20 1, 000 4, 001 1, 002 1, 010 1",
    "reverse_balanced_25": "root 3, 0 2, 1 1, 2 1, 00 3, 01 2, 10 1, 000 3, 001 2, 0000 4, 0001 3",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tables_have_the_published_children(name: str) -> None:
    counts = Counter("".join(map(str, path[:-1])) or "root" for path in paths(load_shape(name)) if path)
    assert counts == {node: int(count) for node, count in (item.split() for item in CHILDREN[name].split(", "))}


def test_shape_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([-1, 0, 0, 1, 1, 2]))
    plan = Static(str(file)).plan(None, 0)  # type: ignore[arg-type]
    assert (plan.depth, plan.nodes, plan.branch) == (2, 6, 2)
    assert plan.shape == (-1, 0, 0, 1, 1, 2)


@FAST
@given(st.lists(plans().filter(lambda plan: plan.depth <= 12 and plan.width <= 20), min_size=1, max_size=4))
def test_covering_plan_is_the_maximum(group: list[TreePlan]) -> None:
    covering = covering_plan(group)
    for name in ("depth", "width", "branch", "nodes"):
        assert getattr(covering, name) == max(getattr(plan, name) for plan in group)
    assert covering_plan(group[:1]) == group[0]
    assert covering_plan(group[::-1]) == covering


@FAST
@given(shapes(), st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_covering_plan_of_truncated_shapes_is_the_deepest(parents: tuple[int, ...], depths: list[int]) -> None:
    plan = TreePlan.from_shape(parents)
    assert covering_plan([plan.truncate(depth) for depth in depths]) == plan.truncate(max(depths))


def test_different_shapes_have_no_covering_plan() -> None:
    with pytest.raises(ConfigError, match=r"share one tree shape.*batch size 1"):
        covering_plan([TreePlan.from_shape((-1, 0, 0)), TreePlan.from_shape((-1, 0, 1))])


def test_plans_are_hashable() -> None:
    assert len({TreePlan(3, 2, 2, 9), TreePlan(3, 2, 2, 9), TreePlan.from_shape((-1, 0))}) == 2
