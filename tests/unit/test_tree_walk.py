"""Verifying all nodes in one go (device) and only those on the path (CPU) accepts the same nodes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from replay_tape import Tape
from torch import Tensor

from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal, TreeLimits, grow_tree
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.rejection import Rejection
from underdraw.verifiers.tree_walk import TreeWalk

CODES = 24
PLAIN = Layout(4, 4, range(4, 4 + CODES))
ROW_ENDS = Layout(4, 3, range(4, 4 + CODES), prologue=(1,), row_end=90, epilogue=(2,))
CODEBOOK = torch.randn(CODES, 3, generator=torch.Generator().manual_seed(0))
WIDE = (-1, *[0] * 10, *[1] * 10, *[2] * 9, *[11] * 10, *[12] * 4, *[30] * 10, 31, 44, 44, 45, 46)  # depth 5
TREES = {
    "root": TreePlan(0, 1, 1, 1),
    "chain": TreePlan(4, 1, 1, 5),
    "best-first": TreePlan(4, 3, 5, 20),
    "shape": TreePlan.from_shape((-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7)),
    "wide": TreePlan.from_shape(WIDE),
}
VERIFIERS: list[tuple[str, Any, Proposal, float]] = [
    ("rejection", Rejection(), "sampled", 1.0),
    ("rejection-greedy", Rejection(), "sampled", 0.0),
    ("lantern-topk", Lantern(delta=0.3, k=4).bind(CODEBOOK), "topk", 1.0),
    ("lantern-sampled", Lantern(delta=1.0, ratio=3.0, k=4).bind(CODEBOOK), "sampled", 1.0),
    ("lantern-greedy", Lantern(delta=0.3, k=4).bind(CODEBOOK), "topk", 0.0),
    ("lantern-greedy-sampled", Lantern(delta=0.3, ratio=4.0, k=4).bind(CODEBOOK), "sampled", 0.0),
]


@dataclass(frozen=True)
class Case:
    """A batch of padded trees, each truncated to a different depth, and the target's logits."""

    tree: DraftTree
    logits: Tensor
    noise_window: NoiseWindow


def make_case(plan: TreePlan, proposal: Proposal, temperature: float, layout: Layout, batch: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(layout, range(seed, seed + batch), temperature=temperature, top_k=9)
    roots = torch.randint(layout.stop - 6, (batch,), generator=generator) + 1
    noise_window = sampler.noise_window(roots, plan.depth + 1)
    truncated = [plan.truncate(max(0, plan.depth - row)) for row in range(batch)]
    tree = grow_tree(
        lambda frontier: 2 * torch.randn(*frontier.tokens.shape, CODES, generator=generator),
        torch.full((batch,), 4),
        plan,
        noise_window,
        proposal=proposal,
        limits=TreeLimits.from_plans(truncated, torch.device("cpu")),
    ).padded(plan.nodes + 3)
    logits = torch.randn(batch, tree.size, CODES, generator=generator)
    index = tree.parents.clamp(min=0) * CODES + layout.vocab_indices(tree.tokens).clamp(0, CODES - 1)
    logits.flatten(1).scatter_add_(1, index, 3.0 * (tree.depths > 0))  # make drafted children likely
    return Case(tree, logits, noise_window)


def verify_all_nodes(verifier: Any, case: Case) -> AcceptedPath:
    """Verify as on a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeWalk, "uses_all_nodes", lambda values: True)
        return verifier.verify(case.tree, case.logits, case.noise_window)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier[0])
def test_all_nodes_and_path_only_accept_the_same(verifier: tuple[str, Any, Proposal, float]) -> None:
    lengths, num_rejected = set(), 0
    for plan, layout, batch, seed in itertools.product(TREES.values(), (PLAIN, ROW_ENDS), (1, 3), range(4)):
        case = make_case(plan, *verifier[2:], layout, batch, seed)
        q = None if case.tree.q is None else case.tree.q.clone()
        by_path = verifier[1].verify(case.tree, case.logits, case.noise_window)
        by_nodes = verify_all_nodes(verifier[1], case)
        width = by_path.path.shape[1]
        assert torch.equal(by_path.length, by_nodes.length) and torch.equal(by_path.next_token, by_nodes.next_token)
        assert torch.equal(by_path.path, by_nodes.path[:, :width]) and not by_nodes.path[:, width:].any()
        assert q is None or (case.tree.q is not None and torch.equal(case.tree.q, q))
        lengths |= set(by_path.length.tolist())
        num_rejected += int((by_path.length < case.tree.depths.amax(1)).sum())
    assert lengths >= {0, 1, 2, 3} and num_rejected > 10, "the cases must contain accepted and rejected nodes"


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier[0])
@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
def test_operation_count_does_not_depend_on_depth(verifier: tuple[str, Any, Proposal, float], layout: Layout) -> None:
    """On a device: at most thirty operations per rank, a hundred others, and no host sync."""

    def count_operations(plan: TreePlan) -> int:
        case = make_case(plan, *verifier[2:], layout, 1, 0)
        return len(Tape(lambda: verify_all_nodes(verifier[1], case).next_token).calls)

    deep, flat = TREES["wide"], TreePlan.from_shape((-1, *[0] * 10))
    assert (deep.depth, deep.branch, deep.nodes) == (5, 10, 59)
    count = count_operations(deep)
    assert count == count_operations(flat)
    assert count <= (80 if verifier[0].startswith("lantern-greedy") else 110 + 30 * deep.branch)
