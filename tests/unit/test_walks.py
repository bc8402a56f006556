"""A device looks at all nodes at once and a CPU at those on the path: the same verdict, and few operations."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tape import Tape
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
    "shape": TreePlan.of((-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7)),
    "wide": TreePlan.of(WIDE),
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
class Given:
    """A batch of trees, each cut to a depth of its own and padded, and the target's logits."""

    tree: DraftTree
    logits: Tensor
    noise_window: NoiseWindow


def given(plan: TreePlan, proposal: Proposal, temperature: float, layout: Layout, batch: int, seed: int) -> Given:
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(layout, range(seed, seed + batch), temperature=temperature, top_k=9)
    noise_window = sampler.noise_window(
        torch.randint(layout.stop - 6, (batch,), generator=generator) + 1, plan.depth + 1
    )
    cuts = [plan.truncate(max(0, plan.depth - row)) for row in range(batch)]
    tree = grow_tree(
        lambda level: 2 * torch.randn(*level.tokens.shape, CODES, generator=generator),
        torch.full((batch,), 4), plan, noise_window, proposal=proposal, limits=TreeLimits.of(cuts, torch.device("cpu")),
    ).padded(plan.nodes + 3)  # fmt: skip
    logits = torch.randn(batch, tree.size, CODES, generator=generator)
    place = tree.parents.clamp(min=0) * CODES + layout.vocab_indices(tree.tokens).clamp(0, CODES - 1)
    logits.flatten(1).scatter_add_(1, place, 3.0 * (tree.depths > 0))  # children are likely
    return Given(tree, logits, noise_window)


def at_once(verifier: Any, of: Given) -> AcceptedPath:
    """What a device does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeWalk, "at_once", lambda on: True)
        return verifier.verify(of.tree, of.logits, of.noise_window)


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier[0])
def test_both_ways_down_agree(verifier: tuple[str, Any, Proposal, float]) -> None:
    lengths, short = set(), 0
    for plan, layout, batch, seed in itertools.product(TREES.values(), (PLAIN, ROW_ENDS), (1, 3), range(4)):
        of = given(plan, *verifier[2:], layout, batch, seed)
        q = None if of.tree.q is None else of.tree.q.clone()
        one, other = verifier[1].verify(of.tree, of.logits, of.noise_window), at_once(verifier[1], of)
        width = one.path.shape[1]
        assert torch.equal(one.length, other.length) and torch.equal(one.next_token, other.next_token)
        assert torch.equal(one.path, other.path[:, :width]) and not other.path[:, width:].any()
        assert q is None or (of.tree.q is not None and torch.equal(of.tree.q, q))
        lengths |= set(one.length.tolist())
        short += int((one.length < of.tree.depths.amax(1)).sum())
    assert lengths >= {0, 1, 2, 3} and short > 10, "nothing was accepted, or nothing rejected"


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier[0])
@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
def test_a_device_begins_few_operations(verifier: tuple[str, Any, Proposal, float], layout: Layout) -> None:
    """However deep the tree is: some thirty a rank at most, a hundred beside, and none that is waited for."""

    def operations(plan: TreePlan) -> int:
        of = given(plan, *verifier[2:], layout, 1, 0)
        return len(Tape(lambda: at_once(verifier[1], of).next_token).calls)

    deep, flat = TREES["wide"], TreePlan.of((-1, *[0] * 10))
    assert (deep.depth, deep.branch, deep.nodes) == (5, 10, 59)
    count = operations(deep)
    assert count == operations(flat)
    assert count <= (80 if verifier[0].startswith("lantern-greedy") else 110 + 30 * deep.branch)
