"""Jacobi trees: well formed for any logits, made of the most probable nodes, over candidates of earlier passes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_models import TableTarget, decode_tokens, random_tables
from torch import Tensor
from tree_checks import check_well_formed, nodes_of

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi, JacobiSession
from underdraw.drafters.jacobi_tree import JacobiTree, JacobiTreeSession
from underdraw.drafters.trunk_tree import grow_trunk_tree
from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.plan import TreePlan, covering_plan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import DraftRequest, Prompt, TargetOutput, VerifiedStep
from underdraw.registry import drafters, policies
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree, TreeLimits
from underdraw.verifiers.exact import Exact, match_all_nodes

FAST = settings(max_examples=100, deadline=None, derandomize=True)
LAYOUT = Layout(4, 5, range(4, 20))
ROW_ENDS = Layout(4, 4, range(4, 20), prologue=(1,), row_end=30, epilogue=(2,))


# --------------------------------------------------------------------------------------------------------------- growth


@dataclass(frozen=True)
class Candidates:
    tokens: Tensor  # (B, D, k) of depths 1 to D
    log_probs: Tensor  # (B, D, k)
    size: int
    trunk: list[int]
    nodes: list[int]

    def grow(self, **options: Any) -> DraftTree:
        batch, _, ranks = self.tokens.shape
        tokens = torch.cat([torch.zeros(batch, 1, ranks, dtype=torch.int64), self.tokens], dim=1)
        certain = torch.tensor([0.0] + [-torch.inf] * (ranks - 1)).expand(batch, 1, -1)
        log_probs = torch.cat([certain, self.log_probs], dim=1)
        limits = {"trunk": torch.tensor(self.trunk), "nodes": torch.tensor(self.nodes)}
        return grow_trunk_tree(tokens, log_probs, self.size, **limits, **options)


@st.composite
def candidates(draw: Any) -> Candidates:
    """Candidates with probabilities between certain and impossible, with many ties, and limits for each tree."""
    batch, depth, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    size = draw(st.integers(depth + 1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    spread = draw(st.sampled_from([0.0, 1.0, 6.0]))
    log_probs = (torch.randn(batch, depth, ranks + 1, generator=generator) * spread).log_softmax(-1)[..., :ranks]
    is_missing = torch.rand(batch, depth, ranks, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    is_missing[..., 0] = False
    log_probs = log_probs.masked_fill(is_missing, -torch.inf)
    is_certain = torch.rand(batch, depth, 1, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    certain = torch.tensor([0.0] + [-torch.inf] * (ranks - 1))
    log_probs = torch.where(is_certain, certain, log_probs)
    tokens = 100 * torch.arange(1, depth + 1)[:, None] + torch.arange(ranks)
    trunk = [draw(st.integers(0, depth)) for _ in range(batch)]
    nodes = [draw(st.integers(length + 1, size)) for length in trunk]
    return Candidates(tokens.expand(batch, -1, -1), log_probs, size, trunk, nodes)


@FAST
@given(candidates())
def test_trunk_trees_are_well_formed_and_within_their_limits(case: Candidates) -> None:
    tree = case.grow()
    check_well_formed(tree)
    assert tree.size <= case.size
    assert tree.ancestors.diagonal(dim1=1, dim2=2).all(), "padding attends to itself"
    for row, (length, most) in enumerate(zip(case.trunk, case.nodes, strict=True)):
        nodes = [node for node in nodes_of(tree, row) if node[2] >= 0]
        assert len(nodes) <= most
        assert max(depth for _, _, depth, _ in nodes) == length
        for token, _, depth, rank in nodes[1:]:
            assert token == 100 * depth + rank, "the candidate of this depth and rank"
        assert [node[0] for node in nodes[1 : length + 1]] == [100 * depth for depth in range(1, length + 1)]


def branch_probabilities(log_probs: Tensor, length: int) -> list[float]:
    """Log probabilities of all nodes outside the trunk, best first, in plain Python."""
    rows = log_probs.double().tolist()
    log_sums = []
    for begin, rank in itertools.product(range(length), range(1, log_probs.shape[1])):
        value = sum(row[0] for row in rows[:begin]) + rows[begin][rank]
        for depth in range(begin, length):
            value += rows[depth][0] if depth > begin else 0.0
            log_sums.append(value)
    return sorted((value for value in log_sums if value > -math.inf), reverse=True)


@FAST
@given(candidates())
def test_trunk_trees_hold_the_most_probable_nodes(case: Candidates) -> None:
    tree = case.grow()
    for row, (length, most) in enumerate(zip(case.trunk, case.nodes, strict=True)):
        expected = branch_probabilities(case.log_probs[row], length)[: most - 1 - length]
        log_probs = []
        for index, (_, _, depth, _) in enumerate(nodes_of(tree, row)):
            path = tree.ancestors[row, index].nonzero().flatten().tolist()[1:]
            if depth > 0 and index > length:
                steps = [(int(tree.depths[row, n]), int(tree.ranks[row, n])) for n in path]
                log_probs.append(sum(float(case.log_probs[row, d - 1, r]) for d, r in steps))
        assert sorted(log_probs, reverse=True) == pytest.approx(expected, abs=1e-4)


def test_branches_below_the_least_probability_are_left_out_and_the_trunk_is_kept() -> None:
    log_probs = torch.tensor([[[0.5, 0.3, 0.1], [0.05, 0.04, 0.03], [0.5, 0.4, 0.01]]]).log()
    tokens = (100 * torch.arange(1, 4)[:, None] + torch.arange(3))[None]
    tree = Candidates(tokens, log_probs, 16, [3], [16]).grow(min_probability=0.09)
    real = [node[0] for node in nodes_of(tree, 0) if node[2] >= 0]
    assert real == [0, 100, 200, 300, 101, 102]


# ---------------------------------------------------------------------------------------------------------- candidates


def tables(session: JacobiTreeSession) -> tuple[Tensor, Tensor]:
    """Candidates and how long they have stayed (B, S, k + 1), and gaps (B, S, k + 1) by step, as views."""
    batch, stride = len(session._first_rows), session.layout.row_stride
    candidates, gaps = (table[:-1].unflatten(0, (batch, -1)) for table in (session.candidates, session.gaps))
    return candidates[:, stride:], gaps[:, stride:]


def session_of(layout: Layout, batch: int = 1, ranks: int = 8) -> JacobiTreeSession:
    prefill = TableTarget(random_tables(layout, 0)[0]).open([Prompt((0,))] * batch, layout, guidance=1.0).prefill
    return JacobiTree(ranks).open([Prompt((0,))] * batch, layout, prefill, guidance=1.0)


def draft_and_commit(
    session: JacobiTreeSession,
    root: Tensor,
    steps: Tensor,
    plans: list[TreePlan],
    logits: Any,
    temperature: float = 1.0,
) -> tuple[DraftTree, VerifiedStep]:
    """One pass; `logits` gives those of a tree (B, N, K)."""
    plan = covering_plan(plans)
    limits = None if all(p == plan for p in plans) else TreeLimits.from_plans(plans, root.device)
    sampler = Sampler(session.layout, list(range(len(root))), temperature=temperature)
    noise_window = sampler.noise_window(steps, plan.depth + 1)
    tree = session.draft(DraftRequest(root, steps, plan, noise_window, limits=limits))
    output = TargetOutput(logits(tree), torch.zeros(*tree.tokens.shape, 1))
    chosen = session.layout.token_ids(noise_window.sample(output.logits, tree.depths + 1))
    path = match_all_nodes(tree, plan.depth + 1, chosen)
    verified = VerifiedStep(tree, path, output, noise_window, path.length + 1, ())
    session.commit(verified)
    return tree, verified


def test_candidates_are_the_best_tokens_of_the_pass_before() -> None:
    """The candidates of step s + 1 are the target's best tokens, with the shared noise, at the node of step s."""
    session, generator = session_of(LAYOUT), torch.Generator().manual_seed(0)
    logits = torch.randn(1, 4, 16, generator=generator)
    root, steps = torch.tensor([5]), torch.tensor([6])
    _, verified = draft_and_commit(session, root, steps, [TreePlan(3, 2, 2, 4)], lambda tree: logits)
    length = int(verified.accepted_path.length)
    scores = verified.noise_window.scores(logits, torch.arange(1, 5)[None])[0]
    for depth in range(length + 1, 4):
        values, indices = scores[depth].topk(8)
        assert (tables(session)[0][0, 7 + depth, :8] == indices + 4).all()
        assert torch.allclose(tables(session)[1][0, 7 + depth, :8], values[0] - values)
    assert tables(session)[0][0, 7 + length, 0] == verified.accepted_path.next_token
    assert (tables(session)[0][0, 11:, 0] == -1).all(), "steps that were not verified have no candidates"


def test_nodes_that_share_the_longest_path_are_averaged() -> None:
    """Of the two nodes of depth 2, only the one on the accepted path counts; without any, all of a depth count."""
    session = session_of(LAYOUT)
    tables(session)[0][0, 7:9, :8] = torch.tensor([[6, 7, 8, 9, 10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17]])
    tables(session)[1][0, 7:9, :8] = torch.arange(8) * 0.1
    plan, root, steps = TreePlan(2, 2, 2, 5), torch.tensor([5]), torch.tensor([6])

    def logits_choosing(token: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(1, 5, 16, generator=generator)
        values[:, 0, token - 4] = 100.0
        return lambda tree: values

    tree, verified = draft_and_commit(session, root, steps, [plan], logits_choosing(7), temperature=0)
    assert nodes_of(tree, 0)[:3] == [(5, -1, 0, 0), (6, 0, 1, 0), (10, 1, 2, 0)]
    deviating = [n for n, node in enumerate(nodes_of(tree, 0)) if node[0] == 7]
    assert verified.accepted_path.path[0, 1] == deviating[0]
    below = [n for n, node in enumerate(nodes_of(tree, 0)) if node[1] == deviating[0]]
    best = verified.output.logits[0, below].mean(0).topk(8)
    assert tables(session)[0][0, 9, :8].tolist() == (best.indices + 4).tolist()

    session.restart([Prompt((0,))], None)  # type: ignore[arg-type]
    tables(session)[0][0, 7:9, :8] = torch.tensor([[6, 7, 8, 9, 10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17]])
    tables(session)[1][0, 7:9, :8] = torch.arange(8) * 0.1
    tree, verified = draft_and_commit(session, root, steps, [plan], logits_choosing(19), temperature=0)
    assert verified.accepted_path.length == 0
    second = [n for n, node in enumerate(nodes_of(tree, 0)) if node[2] == 2]
    assert len(second) > 1
    best = verified.output.logits[0, second].mean(0).topk(8)
    assert tables(session)[0][0, 9, :8].tolist() == (best.indices + 4).tolist()


def first_candidates(session: JacobiTreeSession, root: int, step: int, depth: int) -> list[int]:
    window = Sampler(session.layout, [0]).noise_window(torch.tensor([step]), depth + 1)
    plan = TreePlan(depth, 1, 1, depth + 1)
    tree = session.draft(DraftRequest(torch.tensor([root]), torch.tensor([step]), plan, window))
    return tree.tokens[0, 1:].tolist()


def test_fresh_steps_start_from_the_token_above() -> None:
    session = session_of(LAYOUT)
    tables(session)[0][0, :8, 0] = torch.tensor([4, 5, 6, 7, 8, 9, 10, 11])
    # Steps 8, 9: above are 3 and 4. Steps 10 to 12: below 5 to 7. Then below the root's row: 8 is 7, the root; ...
    assert first_candidates(session, 11, 7, 10) == [7, 8, 9, 10, 11, 7, 8, 9, 10, 11]
    tables(session)[0][0, 9, 0] = 15  # verified before: stays, and is what fresh steps below it start from
    assert first_candidates(session, 11, 7, 8) == [7, 15, 9, 10, 11, 7, 15, 9]


def test_fresh_steps_of_the_first_row_start_from_the_root_and_row_ends_are_forced() -> None:
    assert first_candidates(session_of(LAYOUT), 9, 0, 6) == [9, 9, 9, 9, 9, 9]
    session = session_of(ROW_ENDS)
    # The prologue is step 0 and the root step 1. Row ends are steps 5 and 10; nothing is above the first row.
    assert first_candidates(session, 9, 1, 10) == [9, 9, 9, 30, 9, 9, 9, 9, 30, 9]
    tables(session)[0][0, 3, 0] = 12
    assert first_candidates(session, 9, 1, 8) == [9, 12, 9, 30, 9, 9, 12, 9]


def test_fixed_shapes_take_the_candidates_of_their_ranks() -> None:
    session = session_of(LAYOUT)
    tables(session)[0][0, 7, :8] = torch.arange(4, 12)
    tables(session)[1][0, 7, :8] = torch.arange(8) * 1.0
    plan = TreePlan.from_shape((-1, 0, 0, 0, 1, 1, 2))  # step 8 is fresh: one candidate
    window = Sampler(LAYOUT, [0]).noise_window(torch.tensor([6]), 3)
    tree = session.draft(DraftRequest(torch.tensor([5]), torch.tensor([6]), plan, window))
    check_well_formed(tree)
    assert tree.depths.tolist() == [[0, 1, 1, 1, 2, -1, 2]]
    assert tree.tokens[0, 1:4].tolist() == [4, 5, 6]


@pytest.mark.parametrize("proposal", ["topk", "sampled"])
def test_other_proposals_draft_the_chain_of_jacobi(proposal: Any) -> None:
    window = Sampler(LAYOUT, [0]).noise_window(torch.tensor([0]), 4)
    request = DraftRequest(torch.tensor([5]), torch.tensor([0]), TreePlan(3, 2, 2, 8), window, proposal)
    tree = session_of(LAYOUT).draft(request)
    expected = JacobiSession(Jacobi(), LAYOUT, 1, torch.device("cpu")).draft(request)
    assert torch.equal(tree.tokens, expected.tokens) and torch.equal(tree.parents, expected.parents)
    assert (tree.q is None) == (proposal == "topk")


@pytest.mark.parametrize("layout", [LAYOUT, ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plans_without_branches_draft_what_jacobi_drafts(layout: Layout, temperature: float) -> None:
    """Pass by pass the same accepted lengths, so the same guesses."""
    target = TableTarget(random_tables(layout, seed=1)[0])
    runs = [
        decode_tokens(
            target, drafter, policies.build("chain:depth=6"), Exact(), layout, range(20), temperature=temperature
        )
        for drafter in (JacobiTree(), Jacobi())
    ]
    assert (runs[0][0] == runs[1][0]).all()
    for ours, theirs in zip(runs[0][1], runs[1][1], strict=True):
        assert ours.accepted.tolist() == theirs.accepted.tolist() and ours.passes == theirs.passes


@pytest.mark.parametrize("ranks", [0, 9])
def test_impossible_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match="use 1 to 8"):
        drafters.build(f"jacobi-tree:ranks={ranks}")


# -------------------------------------------------------------------------------------------------------- odd logits


def adversarial_logits(kind: str) -> Any:
    generator = torch.Generator().manual_seed(7)

    def logits(tree: DraftTree) -> Tensor:
        values = torch.randn(*tree.tokens.shape, 16, generator=generator)
        picked = torch.rand(values.shape, generator=generator)
        return {
            "nan": values.masked_fill(picked < 0.4, torch.nan),
            "all-nan": torch.full_like(values, torch.nan),
            "inf": values.masked_fill(picked < 0.2, torch.inf).masked_fill(picked > 0.6, -torch.inf),
            "one-finite": values.masked_fill(picked < picked.amax(-1, keepdim=True), -torch.inf),
            "all-minus-inf": torch.full_like(values, -torch.inf),
            "constant": torch.zeros_like(values),
            "huge": values * 1e37,
        }[kind]

    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("layout", [LAYOUT, ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("kind", ["nan", "all-nan", "inf", "one-finite", "all-minus-inf", "constant", "huge"])
def test_trees_stay_well_formed_whatever_the_logits(kind: str, layout: Layout, temperature: float) -> None:
    session, logits = session_of(layout, batch=2), adversarial_logits(kind)
    root, steps = torch.tensor([5, 6]), torch.full((2,), layout.start)
    plans = [TreePlan(7, 2, 8, 24), TreePlan(4, 2, 3, 9)]
    for _ in range(6):
        tree, verified = draft_and_commit(session, root, steps, plans, logits, temperature)
        check_well_formed(tree)
        valid = {*layout.codes, *([] if layout.row_end is None else [layout.row_end])}
        assert set(tree.tokens.flatten().tolist()) <= valid
        assert ((tree.depths >= 0).sum(1) >= torch.tensor([8, 5])).all(), "the trunk is always there"
        assert session.calibration.counts.isfinite().all()
        root, steps = verified.accepted_path.next_token, (steps + verified.counts).clamp(max=layout.stop - 9)


def test_decoding_equals_plain_decoding_with_constant_and_huge_logits() -> None:
    for spread in (0.0, 1.0, 1e30):
        target = TableTarget(random_tables(ROW_ENDS, seed=3, spread=spread)[0])
        expected, _ = decode_tokens(target, Forced(), NoTree(), Exact(), ROW_ENDS, range(8))
        for tree in ("trunk:nodes=12", "confidence:depth=3,top_k=4,nodes=12"):
            parts = JacobiTree(), policies.build(tree), Exact()
            tokens, _ = decode_tokens(target, *parts, ROW_ENDS, range(8))
            assert (tokens == expected).all()


# ------------------------------------------------------------------------------------------------------- calibration


def test_session_counts_for_how_many_passes_a_first_candidate_has_stayed() -> None:
    session, plan = session_of(LAYOUT), TreePlan(3, 1, 1, 4)
    root, steps = torch.tensor([5]), torch.tensor([6])

    def logits_choosing(*tokens: int) -> Any:
        values = torch.zeros(1, 4, 16)
        for depth, token in enumerate(tokens):
            values[0, depth, token - 4] = 50.0
        return lambda tree: values

    def stays() -> list[int]:
        return tables(session)[0][0, 7:12, -1].tolist()

    assert stays() == [0] * 5
    draft_and_commit(session, root, steps, [plan], logits_choosing(9, 10, 11, 12))
    assert stays() == [1, 1, 1, 1, 0], "the first of the next step is no token above"
    draft_and_commit(session, root, steps, [plan], logits_choosing(9, 10, 13, 12))
    assert stays() == [2, 2, 1, 2, 0]
    draft_and_commit(session, root, steps, [TreePlan(1, 1, 1, 2)], lambda tree: logits_choosing(9, 10)(tree)[:, :2])
    assert stays() == [3, 3, 1, 2, 0], "steps that were not verified stay what they are"


def test_session_counts_accepted_depths_and_the_first_miss() -> None:
    session = session_of(ROW_ENDS)
    tables(session)[0][0, 2:5, 0] = torch.tensor([6, 7, 8])
    tables(session)[1][0, 2:5, 1] = 0.1
    tables(session)[0][0, 2:5, 1] = 9
    tables(session)[0][0, 2:5, -1] = 2

    def logits(tree: DraftTree) -> Tensor:
        values = torch.zeros(1, tree.size, 16)
        chosen = {0: 6, 1: 9}  # depth 1 as drafted, depth 2 is the second candidate, which is no node; then a miss
        for node, (_, _, depth, _) in enumerate(nodes_of(tree, 0)):
            values[0, node, chosen.get(depth, 15) - 4] = 50.0
        return values

    draft_and_commit(session, torch.tensor([5]), torch.tensor([1]), [TreePlan(4, 2, 2, 5)], logits)
    observed = session.calibration.counts[:, 0]
    assert observed[2, :3].tolist() == [1, 1, 0] and observed.sum() == 2


def test_restart_forgets_everything_in_the_same_tensors() -> None:
    session = session_of(LAYOUT)
    tensors = (session.candidates, session.gaps, session.calibration.counts)
    addresses = [tensor.data_ptr() for tensor in tensors]
    new = [tensor.clone() for tensor in tensors]
    plans = [TreePlan(6, 2, 8, 20)]
    draft_and_commit(session, torch.tensor([5]), torch.tensor([3]), plans, lambda tree: torch.randn(1, tree.size, 16))
    assert not any(torch.equal(one, other) for one, other in zip(tensors, new, strict=True))
    assert session.restart([Prompt((0,))], None)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(tensors, new, strict=True))
    assert [tensor.data_ptr() for tensor in (session.candidates, session.gaps, session.calibration.counts)] == addresses
    assert not session.restart([Prompt((0,))] * 2, None)  # type: ignore[arg-type]
