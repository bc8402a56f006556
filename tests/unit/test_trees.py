"""Invariant 3 and what goes with it: trees are well formed, stay within their plans, and padding never wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TableDrafter, TableTarget, draw, tables
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.layout import Layout
from underdraw.plan import TreePlan, TreeShape, covering_plan
from underdraw.registry import policies
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
from underdraw.verifiers.exact import Exact, match_all_nodes, match_along_path

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
    """A batch of trees with the plan they share, the plans of their own, and the draws."""

    tree: DraftTree
    plan: TreePlan
    own: list[TreePlan]
    noise_window: NoiseWindow


@st.composite
def grown(draw: Any, proposals: tuple[Proposal, ...] = PROPOSALS, shaped: bool = False) -> Grown:
    layout, batch = draw(layouts()), draw(st.integers(1, 3))
    if shaped:
        plan = TreePlan.from_shape(draw(shapes()))
        own = [plan.truncate(draw(st.integers(0, plan.depth))) for _ in range(batch)]
    else:
        own = [draw(plans()) for _ in range(batch)]
        plan = covering_plan(own)
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
        lambda level: torch.randn(*level.tokens.shape, len(layout.codes), generator=generator) * spread,
        torch.full((batch,), 4), plan, noise_window, proposal=draw(st.sampled_from(proposals)),
        calibration=draw(st.sampled_from([None, Calibration(), Calibration(2.0, (0.0, -0.7, 0.4), 0.01)])),
        limits=None if all(p == plan for p in own) else TreeLimits.from_plans(own, torch.device("cpu")),
    )  # fmt: skip
    return Grown(tree, plan, own, noise_window)


def nodes_of(tree: DraftTree, row: int) -> list[tuple[int, int, int, int]]:
    """(token, parent, depth, rank) of each node of one tree."""
    return list(
        zip(*(column[row].tolist() for column in (tree.tokens, tree.parents, tree.depths, tree.ranks)), strict=True)
    )


def check_form(tree: DraftTree) -> None:
    """Invariant 3, for every tree of a batch."""
    for row in range(tree.tokens.shape[0]):
        nodes = nodes_of(tree, row)
        assert nodes[0][1:3] == (-1, 0), "node 0 is the root"
        siblings: dict[int, list[tuple[int, int]]] = {}
        for index, (token, parent, depth, rank) in enumerate(nodes[1:], start=1):
            assert parent < index, "a parent comes before its children"
            if depth == -1:
                continue
            assert nodes[parent][2] >= 0, "a kept node's parent is kept"
            assert depth == nodes[parent][2] + 1, "a node lies one level below its parent"
            siblings.setdefault(parent, []).append((rank, token))
        for children in siblings.values():
            assert len({token for _, token in children}) == len(children), "siblings hold different tokens"
            assert len({rank for rank, _ in children}) == len(children), "siblings have different ranks"
        for index, (_, parent, depth, _) in enumerate(nodes):
            if depth == -1:
                continue
            line = {index}
            while parent >= 0:
                line.add(parent)
                parent = nodes[parent][1]
            assert set(tree.ancestors[row, index].nonzero().flatten().tolist()) == line


def check_size(tree: DraftTree, own: list[TreePlan]) -> None:
    """No tree is larger than its own plan allows."""
    for row, limit in enumerate(own):
        every = nodes_of(tree, row)
        nodes = [node for node in every if node[2] >= 0]
        assert len(nodes) <= limit.nodes
        assert max(depth for _, _, depth, _ in nodes) <= limit.depth
        parents = [parent for _, parent, depth, _ in nodes if depth > 0]
        assert all(parents.count(parent) <= limit.branch for parent in parents)
        for level in range(limit.depth):
            assert len({parent for parent in parents if every[parent][2] == level}) <= limit.width


@FAST
@given(grown())
def test_grown_trees_are_well_formed(result: Grown) -> None:
    check_form(result.tree)
    assert result.tree.size <= result.plan.nodes


@FAST
@given(grown(shaped=True))
def test_trees_of_a_fixed_shape_are_well_formed_and_within_their_plans(result: Grown) -> None:
    check_form(result.tree)
    check_size(result.tree, result.own)


@FAST
@given(grown(("coupled", "topk")))
def test_trees_stay_within_their_own_plans(result: Grown) -> None:
    """Node, depth, branch and width limits hold for every row of a batch, not only for the plan that they share."""
    check_size(result.tree, result.own)


def expand_at_random(layout: Layout, seed: int) -> ExpandFn:
    generator = torch.Generator().manual_seed(seed)
    return lambda level: torch.randn(*level.tokens.shape, len(layout.codes), generator=generator) * 2


def test_sampled_trees_stay_within_their_own_plans() -> None:
    own = [TreePlan(5, 1, 1, 6), TreePlan(2, 6, 6, 30)]
    noise_window = Sampler(PLAIN, [0, 1]).noise_window(torch.tensor([0, 3]), 6)
    limits = TreeLimits.from_plans(own, torch.device("cpu"))
    root = torch.tensor([4, 4])
    tree = grow_tree(
        expand_at_random(PLAIN, 0), root, covering_plan(own), noise_window, proposal="sampled", limits=limits
    )
    check_form(tree)
    check_size(tree, own)


def test_no_calibration_breaks_a_tree() -> None:
    """A kept node's parent is kept, whatever the biases: at every budget, with forced tokens among the children."""
    layout = Layout(4, 3, range(4, 20), row_end=30)
    for seed in range(20):
        noise_window = Sampler(layout, [seed]).noise_window(torch.tensor([0]), 6)
        for nodes in range(6, 26):
            check_form(
                grow_tree(
                    expand_at_random(layout, seed), torch.tensor([5]), TreePlan(5, 4, 4, nodes), noise_window,
                    calibration=Calibration(biases=(0.85, 0.65)),
                )
            )  # fmt: skip


@pytest.mark.parametrize(("width", "nodes"), [(4, 30), (2, 19)])
def test_a_plan_is_used_up(width: int, nodes: int) -> None:
    """Trees are as large as the plan allows where there are children enough, be it by its nodes or by its levels."""
    noise_window = Sampler(PLAIN, [3]).noise_window(torch.tensor([0]), 6)
    plan = TreePlan(5, width, width, 30)
    for proposal in PROPOSALS:
        tree = grow_tree(expand_at_random(PLAIN, 1), torch.tensor([4]), plan, noise_window, proposal=proposal)
        assert tree.size == plan.nodes == nodes
        assert int((tree.depths >= 0).sum()) == nodes
        assert (tree.q is None) == (proposal != "sampled")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_children_are_what_their_proposal_says(temperature: float) -> None:
    """coupled: best of log q + the target's noise; topk: best of q; sampled: best of log q + noise of its own."""
    noise_window = Sampler(PLAIN, [5, 6], temperature=temperature).noise_window(torch.tensor([2, 9]), 3)
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    plan = TreePlan.from_shape((-1, 0, 0, 1, 1, 2))

    def expand(level: Frontier) -> Tensor:
        return logits[:, : level.tokens.shape[1]] if level.depth == 0 else logits[:, 1 : 1 + level.tokens.shape[1]]

    for proposal in PROPOSALS:
        tree = grow_tree(expand, torch.tensor([4, 4]), plan, noise_window, proposal=proposal)
        for row in range(2):
            for parent, line, level in ((0, 0, 0), (1, 1, 1), (2, 2, 1)):
                noise = torch.zeros(12)
                if temperature and proposal != "topk":
                    noise = noise_window.gumbel("target" if proposal == "coupled" else "draft")[row, level]
                order = (logits[row, line] + noise).argsort(descending=True)
                found = tree.tokens[row][(tree.parents[row] == parent) & (tree.depths[row] > 0)]
                assert (found - 4).tolist() == order[: len(found)].tolist()
                if tree.q is not None:
                    torch.testing.assert_close(tree.q[row, parent], logits[row, line].softmax(-1))


def grown_slowly(
    table: Tensor, plan: TreePlan, noise_window: NoiseWindow, proposal: Proposal, calibration: Calibration | None
) -> set[tuple[int, ...]]:
    """The columns that lead to each kept node, grown one node at a time; the table is (depth, last column, K)."""
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # (path, log chance) of the nodes to expand
    pool: list[tuple[tuple[int, ...], float]] = []
    for depth in range(1, plan.depth + 1):
        found: list[tuple[tuple[int, ...], float]] = []
        for path, reached in level:
            logits = table[depth - 1, path[-1] if path else 0]
            scores = logits if proposal == "topk" else logits + noise_window.gumbel("target")[0, depth - 1]
            columns = scores.argsort(descending=True)[: plan.branch]
            chances = logits.log_softmax(-1)[columns]
            if calibration is not None and proposal == "coupled":
                bias = torch.tensor(
                    [calibration.biases[min(r, len(calibration.biases) - 1)] for r in range(plan.branch)]
                )
                weight = (bias + (scores[columns] - scores.max()) * calibration.slope).exp()
                chances = (weight / (weight.sum() + calibration.miss)).log()
            found += [((*path, c), reached + p) for c, p in zip(columns.tolist(), chances.tolist(), strict=True)]
        pool += found
        level = sorted(found, key=lambda node: -node[1])[: plan.width]
    return {path for path, _ in sorted(pool, key=lambda node: -node[1])[: plan.nodes - 1]}


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
def test_growth_matches_a_slow_one(plan: TreePlan, proposal: Proposal, calibration: Calibration | None) -> None:
    """Best first: the most promising nodes are expanded, and the best of all that were seen are kept."""
    for seed in range(5):
        table = torch.randn(5, 12, 12, generator=torch.Generator().manual_seed(seed))
        noise_window = Sampler(PLAIN, [seed]).noise_window(torch.tensor([0]), 6)
        tree = grow_tree(
            lambda level, table=table: table[level.depth, (level.tokens - 4) * (level.depth > 0)],  # type: ignore[misc]
            torch.tensor([9]), plan, noise_window, proposal=proposal, calibration=calibration,
        )  # fmt: skip
        paths: list[tuple[int, ...]] = []
        for token, parent, _, _ in nodes_of(tree, 0):
            paths.append(() if parent < 0 else (*paths[parent], token - 4))
        assert set(paths[1:]) == grown_slowly(table, plan, noise_window, proposal, calibration)


# ----------------------------------------------------------------------------------------------- walking down trees


def walk(tree: DraftTree, choices: Tensor, row: int) -> tuple[list[int], int]:
    """The path that the target agrees with and its next token, one node at a time."""
    path, nodes = [0], nodes_of(tree, row)
    while True:
        wanted = int(choices[row, path[-1]])
        steps = [
            i
            for i, (token, parent, depth, _) in enumerate(nodes)
            if depth > 0 and (parent, token) == (path[-1], wanted)
        ]
        if not steps:
            return path, wanted
        path.append(steps[0])


def agreed(tree: DraftTree, choices: Tensor) -> AcceptedPath:
    """`agree` with the choices (B, N) of all nodes known beforehand."""
    return match_along_path(tree, tree.size, lambda node, depth: choices.gather(1, node[:, None])[:, 0])


@FAST
@given(st.one_of(grown(), grown(shaped=True)), st.integers(0, 10**6))
def test_agree_matches_a_slow_walk(result: Grown, seed: int) -> None:
    """Also where the choices are what padding happens to hold: padding never wins."""
    tree = result.tree
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(tree.size, tree.tokens.shape, generator=generator)
    choices = tree.tokens.gather(1, pick)
    accepted_path = agreed(tree, choices)
    for row in range(tree.tokens.shape[0]):
        path, next_token = walk(tree, choices, row)
        assert accepted_path.length[row] == len(path) - 1
        assert accepted_path.path[row].tolist() == path + [0] * (accepted_path.path.shape[1] - len(path))
        assert accepted_path.next_token[row] == next_token
        assert (tree.depths[row, path] >= 0).all()
    at_once, width = match_all_nodes(tree, tree.size, choices), accepted_path.path.shape[1]
    assert torch.equal(at_once.path[:, :width], accepted_path.path) and not at_once.path[:, width:].any()
    assert torch.equal(at_once.length, accepted_path.length) and torch.equal(
        at_once.next_token, accepted_path.next_token
    )
    narrow = accepted_path.narrow(int(accepted_path.length.max()))
    assert narrow.path.shape[1] == int(accepted_path.length.max()) + 1


def test_padding_never_wins() -> None:
    tree = chain(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]), torch.tensor([1, 3]))
    accepted_path = agreed(tree, torch.tensor([[6, 7, 8, 9], [6, 7, 8, 9]]))
    assert accepted_path.length.tolist() == [1, 3]
    assert accepted_path.next_token.tolist() == [7, 9]
    assert accepted_path.path.tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]


def test_only_root_and_chain() -> None:
    check_form(root_only(torch.tensor([7, 8])))
    check_form(chain(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([0, 2])))
    assert root_only(torch.tensor([7, 8])).size == 1


@FAST
@given(shapes(by_level=False))
def test_ancestry_is_its_definition(parents: tuple[int, ...]) -> None:
    shape = TreeShape.from_parents(parents)
    table = ancestor_mask(torch.tensor([parents]), max(shape.depths))[0]
    for node, parent in enumerate(parents):
        line = {node} | (set(table[parent].nonzero().flatten().tolist()) if parent >= 0 else set())
        assert set(table[node].nonzero().flatten().tolist()) == line


@pytest.mark.parametrize(
    "layout", [Layout(3, 4, range(4, 10)), Layout(3, 3, range(4, 10), (1, 2), 20, (3,))], ids=["plain", "row-ends"]
)
@pytest.mark.parametrize("policy", ["chain:depth=30", "static", "confidence", "adjacency", "adjacency:init=random"])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_trees_never_reach_past_the_last_token(layout: Layout, policy: str, proposal: str) -> None:
    """The deepest node leaves one step for the target's own token; finished images get no tree at all.

    Invariant 5: a row end is drafted where it is due and nowhere else.
    """
    target, draft = tables(layout, seed=1)
    drafter = TableDrafter(draft)
    seeds = [1, 2, 3, 4]
    tokens, _ = draw(TableTarget(target), drafter, policies.build(policy), Exact(), layout, seeds, proposal=proposal)
    plain, _ = draw(TableTarget(target), TableDrafter(draft), policies.build("none"), Exact(), layout, seeds)
    assert tokens.tolist() == plain.tolist()
    for request, tree in drafter.seen:
        check_form(tree)
        steps = request.steps[:, None] + tree.depths
        assert (steps.amax(-1) <= request.steps.clamp(min=layout.stop - 2)).all()
        drafted = tree.depths > 0
        if layout.row_end is not None:
            assert torch.equal((tree.tokens == layout.row_end)[drafted], layout.is_row_end(steps)[drafted])


@pytest.mark.parametrize("min_probability", [0.01, 0.1, 0.4])
def test_a_floor_leaves_out_what_is_unlikely_and_nothing_else(min_probability: float) -> None:
    """A tree with a min_probability is the tree without one, less the nodes below it and their descendants."""
    sampler, calibration = Sampler(PLAIN, [11]), Calibration(1.5, (0.0, -0.2), 0.1)
    noise_window = sampler.noise_window(torch.tensor([2]), 4)

    def logits(depth: int, token: int) -> Tensor:  # the same for the same node, whichever tree asks
        return torch.randn(12, generator=torch.Generator().manual_seed(100 * depth + token)) * 2

    def tree(least: float) -> DraftTree:
        def expand(level: Frontier) -> Tensor:
            return torch.stack([logits(level.depth, token) for token in level.tokens[0].tolist()])[None]

        plan = TreePlan(3, 12, 12, 128, min_probability=least)
        return grow_tree(expand, torch.tensor([4]), plan, noise_window, calibration=calibration)

    everything, chances = nodes_of(tree(0.0), 0), [1.0]
    for _, parent, depth, rank in everything[1:]:
        scores = noise_window.level_scores(logits(depth - 1, everything[parent][0])[None, None], depth)
        chance = calibration.log_acceptance_probability(
            scores.sort(descending=True).values, has_forced_tokens=False
        ).exp()[0, 0, rank]
        chances.append(chances[parent] * float(chance))
    kept = [
        (token, depth, rank)
        for (token, _, depth, rank), chance in zip(everything, chances, strict=True)
        if chance >= min_probability
    ]
    pruned = [(token, depth, rank) for token, _, depth, rank in nodes_of(tree(min_probability), 0)]
    assert sorted(pruned) == sorted(kept)
    assert 1 < len(kept) < len(everything)
