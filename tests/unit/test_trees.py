"""Draft trees are well formed, stay within their plans, and padding is never accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_checks import check_well_formed, nodes_of

from underdraw.calibration import Calibration
from underdraw.layout import Layout
from underdraw.plan import TreePlan, TreeShape, covering_plan
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import (
    AcceptedPath,
    DraftTree,
    ExpandFn,
    Frontier,
    Proposal,
    TreeLimits,
    ancestor_mask,
    chain,
    grow_tree,
    root_only,
)
from underdraw.verifiers.exact import match_all_nodes, match_along_path

PROPOSALS: tuple[Proposal, ...] = ("coupled", "topk", "sampled")
PLAIN = Layout(4, 4, range(4, 16))
FAST = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def plans(draw: Any, deepest: int = 6) -> TreePlan:
    depth, width = draw(st.integers(0, deepest)), draw(st.integers(1, 6))
    min_probability = draw(st.sampled_from([0.0, 0.0, 0.02, 0.3]))
    return TreePlan(
        depth, width, draw(st.integers(1, 8)), draw(st.integers(depth + 1, 40)), min_probability=min_probability
    )


@st.composite
def shapes(draw: Any, by_level: bool = True) -> tuple[int, ...]:
    """Parents of every node, level by level, or in any order that puts a parent before its children."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, 24))):
        parents.append(draw(st.integers(max(parents[-1], 0) if by_level else 0, node - 1)))
    return tuple(parents)


@st.composite
def layouts(draw: Any) -> Layout:
    row_end = draw(st.sampled_from([None, 99]))
    return Layout(
        draw(st.integers(1, 4)), draw(st.integers(1, 5)), range(4, 4 + draw(st.integers(2, 12))), (1,), row_end
    )


@dataclass(frozen=True)
class Grown:
    """A batch of trees with the covering plan and the plan of each tree."""

    tree: DraftTree
    plan: TreePlan
    plans: list[TreePlan]
    noise_window: NoiseWindow


@st.composite
def grown_trees(draw: Any, proposals: tuple[Proposal, ...] = PROPOSALS, shaped: bool = False) -> Grown:
    layout, batch = draw(layouts()), draw(st.integers(1, 3))
    if shaped:
        plan = TreePlan.from_shape(draw(shapes()))
        tree_plans = [plan.truncate(draw(st.integers(0, plan.depth))) for _ in range(batch)]
    else:
        tree_plans = [draw(plans()) for _ in range(batch)]
        plan = covering_plan(tree_plans)
    sampler = Sampler(
        layout, [draw(st.integers(0, 2**62 - 1)) for _ in range(batch)],
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0])), top_k=draw(st.sampled_from([0, 1, 3])),
    )  # fmt: skip
    noise_window = sampler.noise_window(
        torch.tensor([draw(st.integers(0, layout.steps)) for _ in range(batch)]), plan.depth + 1
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    spread = draw(st.sampled_from([0.0, 1.0, 5.0, 200.0]))
    tree = grow_tree(
        lambda frontier: torch.randn(*frontier.tokens.shape, len(layout.codes), generator=generator) * spread,
        torch.full((batch,), 4), plan, noise_window, proposal=draw(st.sampled_from(proposals)),
        calibration=draw(st.sampled_from([None, Calibration(), Calibration(2.0, (0.0, -0.7, 0.4), 0.01)])),
        limits=None if all(p == plan for p in tree_plans) else TreeLimits.from_plans(tree_plans, torch.device("cpu")),
    )  # fmt: skip
    return Grown(tree, plan, tree_plans, noise_window)


def check_size(tree: DraftTree, tree_plans: list[TreePlan]) -> None:
    """No tree is larger than its plan allows."""
    for row, limit in enumerate(tree_plans):
        all_nodes = nodes_of(tree, row)
        nodes = [node for node in all_nodes if node[2] >= 0]
        assert len(nodes) <= limit.nodes
        assert max(depth for _, _, depth, _ in nodes) <= limit.depth
        parents = [parent for _, parent, depth, _ in nodes if depth > 0]
        assert all(parents.count(parent) <= limit.branch for parent in parents)
        for level in range(limit.depth):
            assert len({parent for parent in parents if all_nodes[parent][2] == level}) <= limit.width


@FAST
@given(grown_trees())
def test_trees_are_well_formed(result: Grown) -> None:
    check_well_formed(result.tree)
    assert result.tree.size <= result.plan.nodes


@FAST
@given(grown_trees(shaped=True))
def test_fixed_shapes_are_well_formed_and_within_their_plans(result: Grown) -> None:
    check_well_formed(result.tree)
    check_size(result.tree, result.plans)


@FAST
@given(grown_trees(("coupled", "topk")))
def test_each_tree_stays_within_its_plan(result: Grown) -> None:
    """Node, depth, branch and width limits hold per tree, not only for the covering plan."""
    check_size(result.tree, result.plans)


def random_expand(layout: Layout, seed: int) -> ExpandFn:
    generator = torch.Generator().manual_seed(seed)
    return lambda frontier: torch.randn(*frontier.tokens.shape, len(layout.codes), generator=generator) * 2


def test_sampled_trees_stay_within_their_plans() -> None:
    tree_plans = [TreePlan(5, 1, 1, 6), TreePlan(2, 6, 6, 30)]
    noise_window = Sampler(PLAIN, [0, 1]).noise_window(torch.tensor([0, 3]), 6)
    limits = TreeLimits.from_plans(tree_plans, torch.device("cpu"))
    root = torch.tensor([4, 4])
    tree = grow_tree(
        random_expand(PLAIN, 0), root, covering_plan(tree_plans), noise_window, proposal="sampled", limits=limits
    )
    check_well_formed(tree)
    check_size(tree, tree_plans)


def test_biased_calibration_keeps_parents() -> None:
    """A kept node's parent is kept, whatever the biases, at every node budget and with forced tokens."""
    layout = Layout(4, 3, range(4, 20), row_end=30)
    for seed in range(20):
        noise_window = Sampler(layout, [seed]).noise_window(torch.tensor([0]), 6)
        for nodes in range(6, 26):
            check_well_formed(
                grow_tree(
                    random_expand(layout, seed), torch.tensor([5]), TreePlan(5, 4, 4, nodes), noise_window,
                    calibration=Calibration(biases=(0.85, 0.65)),
                )
            )  # fmt: skip


@pytest.mark.parametrize(("width", "nodes"), [(4, 30), (2, 19)])
def test_trees_use_the_whole_plan(width: int, nodes: int) -> None:
    """Trees have as many nodes as the plan allows, limited by `nodes` or by the levels."""
    noise_window = Sampler(PLAIN, [3]).noise_window(torch.tensor([0]), 6)
    plan = TreePlan(5, width, width, 30)
    for proposal in PROPOSALS:
        tree = grow_tree(random_expand(PLAIN, 1), torch.tensor([4]), plan, noise_window, proposal=proposal)
        assert tree.size == plan.nodes == nodes
        assert int((tree.depths >= 0).sum()) == nodes
        assert (tree.q is None) == (proposal != "sampled")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_children_follow_the_proposal(temperature: float) -> None:
    """coupled: largest log q + target noise; topk: largest q; sampled: largest log q + draft noise."""
    noise_window = Sampler(PLAIN, [5, 6], temperature=temperature).noise_window(torch.tensor([2, 9]), 3)
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    plan = TreePlan.from_shape((-1, 0, 0, 1, 1, 2))

    def expand(frontier: Frontier) -> Tensor:
        width = frontier.tokens.shape[1]
        return logits[:, :width] if frontier.depth == 0 else logits[:, 1 : 1 + width]

    for proposal in PROPOSALS:
        tree = grow_tree(expand, torch.tensor([4, 4]), plan, noise_window, proposal=proposal)
        for row in range(2):
            for parent, line, level in ((0, 0, 0), (1, 1, 1), (2, 2, 1)):
                noise = torch.zeros(12)
                if temperature and proposal != "topk":
                    noise = noise_window.gumbel("target" if proposal == "coupled" else "draft")[row, level]
                order = (logits[row, line] + noise).argsort(descending=True)
                children = tree.tokens[row][(tree.parents[row] == parent) & (tree.depths[row] > 0)]
                assert (children - 4).tolist() == order[: len(children)].tolist()
                if tree.q is not None:
                    torch.testing.assert_close(tree.q[row, parent], logits[row, line].softmax(-1))


def reference_growth(
    table: Tensor, plan: TreePlan, noise_window: NoiseWindow, proposal: Proposal, calibration: Calibration | None
) -> set[tuple[int, ...]]:
    """Codes on the path to each kept node, grown one node at a time; the table is (depth, previous code, K)."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # (path, log probability)
    candidates: list[tuple[tuple[int, ...], float]] = []
    for depth in range(1, plan.depth + 1):
        level: list[tuple[tuple[int, ...], float]] = []
        for path, path_log_prob in frontier:
            logits = table[depth - 1, path[-1] if path else 0]
            scores = logits if proposal == "topk" else logits + noise_window.gumbel("target")[0, depth - 1]
            codes = scores.argsort(descending=True)[: plan.branch]
            log_probs = logits.log_softmax(-1)[codes]
            if calibration is not None and proposal == "coupled":
                bias = torch.tensor(
                    [calibration.biases[min(r, len(calibration.biases) - 1)] for r in range(plan.branch)]
                )
                weight = (bias + (scores[codes] - scores.max()) * calibration.slope).exp()
                log_probs = (weight / (weight.sum() + calibration.miss)).log()
            level += [((*path, c), path_log_prob + p) for c, p in zip(codes.tolist(), log_probs.tolist(), strict=True)]
        candidates += level
        frontier = sorted(level, key=lambda node: -node[1])[: plan.width]
    return {path for path, _ in sorted(candidates, key=lambda node: -node[1])[: plan.nodes - 1]}


@pytest.mark.parametrize(
    "plan", [TreePlan(1, 1, 3, 4), TreePlan(4, 3, 4, 14), TreePlan(5, 2, 3, 30), TreePlan(3, 6, 6, 59)]
)
@pytest.mark.parametrize(
    ("proposal", "calibration"),
    [
        ("topk", None),
        ("coupled", None),
        ("coupled", Calibration()),
        ("coupled", Calibration(0.5, (0.0, -1.0, 0.5), 0.2)),
    ],
)
def test_growth_matches_reference(plan: TreePlan, proposal: Proposal, calibration: Calibration | None) -> None:
    """The most probable nodes of a level are expanded, and the most probable of all candidates are kept."""
    for seed in range(5):
        table = torch.randn(5, 12, 12, generator=torch.Generator().manual_seed(seed))
        noise_window = Sampler(PLAIN, [seed]).noise_window(torch.tensor([0]), 6)
        tree = grow_tree(
            lambda f, table=table: table[f.depth, (f.tokens - 4) * (f.depth > 0)],  # type: ignore[misc]
            torch.tensor([9]), plan, noise_window, proposal=proposal, calibration=calibration,
        )  # fmt: skip
        paths: list[tuple[int, ...]] = []
        for token, parent, _, _ in nodes_of(tree, 0):
            paths.append(() if parent < 0 else (*paths[parent], token - 4))
        assert set(paths[1:]) == reference_growth(table, plan, noise_window, proposal, calibration)


# ---------------------------------------------------------------------------------------------------- verification


def reference_walk(tree: DraftTree, choices: Tensor, row: int) -> tuple[list[int], int]:
    """The accepted path and the next token, one node at a time."""
    path, nodes = [0], nodes_of(tree, row)
    while True:
        choice = int(choices[row, path[-1]])
        children = [
            i
            for i, (token, parent, depth, _) in enumerate(nodes)
            if depth > 0 and (parent, token) == (path[-1], choice)
        ]
        if not children:
            return path, choice
        path.append(children[0])


def match_choices(tree: DraftTree, choices: Tensor) -> AcceptedPath:
    """`match_along_path` with fixed choices (B, N) of all nodes."""
    return match_along_path(tree, tree.size, lambda node, depth: choices.gather(1, node[:, None])[:, 0])


@FAST
@given(st.one_of(grown_trees(), grown_trees(shaped=True)), st.integers(0, 10**6))
def test_matching_equals_reference_walk(result: Grown, seed: int) -> None:
    """Also where the choices are tokens of padding, which is never accepted."""
    tree = result.tree
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(tree.size, tree.tokens.shape, generator=generator)
    choices = tree.tokens.gather(1, pick)
    accepted_path = match_choices(tree, choices)
    for row in range(tree.tokens.shape[0]):
        path, next_token = reference_walk(tree, choices, row)
        assert accepted_path.length[row] == len(path) - 1
        assert accepted_path.path[row].tolist() == path + [0] * (accepted_path.path.shape[1] - len(path))
        assert accepted_path.next_token[row] == next_token
        assert (tree.depths[row, path] >= 0).all()
    by_nodes, width = match_all_nodes(tree, tree.size, choices), accepted_path.path.shape[1]
    assert torch.equal(by_nodes.path[:, :width], accepted_path.path) and not by_nodes.path[:, width:].any()
    assert torch.equal(by_nodes.length, accepted_path.length)
    assert torch.equal(by_nodes.next_token, accepted_path.next_token)
    narrow = accepted_path.narrow(int(accepted_path.length.max()))
    assert narrow.path.shape[1] == int(accepted_path.length.max()) + 1


def test_padding_is_never_accepted() -> None:
    tree = chain(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]), torch.tensor([1, 3]))
    accepted_path = match_choices(tree, torch.tensor([[6, 7, 8, 9], [6, 7, 8, 9]]))
    assert accepted_path.length.tolist() == [1, 3]
    assert accepted_path.next_token.tolist() == [7, 9]
    assert accepted_path.path.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]


def test_root_only_and_chain_are_well_formed() -> None:
    check_well_formed(root_only(torch.tensor([7, 8])))
    check_well_formed(chain(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([0, 2])))
    assert root_only(torch.tensor([7, 8])).size == 1


@FAST
@given(shapes(by_level=False))
def test_ancestor_mask(parents: tuple[int, ...]) -> None:
    shape = TreeShape.from_parents(parents)
    table = ancestor_mask(torch.tensor([parents]), max(shape.depths))[0]
    for node, parent in enumerate(parents):
        line = {node} | (set(table[parent].nonzero().flatten().tolist()) if parent >= 0 else set())
        assert set(table[node].nonzero().flatten().tolist()) == line
