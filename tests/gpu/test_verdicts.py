"""Verifiers with a law of their own: captured passes draw what passes draw as they are, and verdicts are a CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import captured
import pytest
import torch
import toy

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.plan import TreePlan
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal, grow_tree
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.rejection import Rejection

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES: list[tuple[Any, Proposal, float]] = [
    (Rejection(), "sampled", 1.0),
    (Lantern(delta=0.3, k=4), "topk", 1.0),
    (Lantern(delta=0.3, ratio=3.0, k=4), "sampled", 1.0),
    (Lantern(delta=0.3, k=4), "topk", 0.0),
]
IDS = ["rejection", "lantern-topk", "lantern-sampled", "lantern-greedy"]


def bound(verifier: Any, device: str) -> Any:
    codebook = torch.randn(len(toy.CODES), 4, generator=torch.Generator().manual_seed(1))
    return verifier.bind(codebook.to(device)) if isinstance(verifier, Lantern) else verifier


@pytest.mark.parametrize(("verifier", "proposal", "temperature"), CASES, ids=IDS)
@pytest.mark.parametrize("tree", ["chain:depth=3", "adjacency:nodes=12,d_max=6"])
def test_captured_passes_draw_the_same(verifier: Any, proposal: Proposal, temperature: float, tree: str) -> None:
    of, kept = toy.target(device="cuda"), GraphCache()
    own, policy = toy.eagle(of, above=True), policies.build(tree)
    given: dict[str, Any] = {"verifier": bound(verifier, "cuda"), "proposal": proposal, "temperature": temperature}
    given.update(seeds=(4, 5), layout=toy.ROW_ENDS)
    expected = toy.run(of, own, policy, **given)[0]
    for _ in range(2):
        assert torch.equal(toy.run(of, own, policy, graphs=kept, **given)[0], expected)
    assert captured.captured(kept) >= 1


def moved(tree: DraftTree, device: str) -> DraftTree:
    parts = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "ancestors", "ranks", "q")}
    return replace(tree, **{name: None if part is None else part.to(device) for name, part in parts.items()})


@pytest.mark.parametrize(("verifier", "proposal", "temperature"), CASES, ids=IDS)
def test_verdicts_are_those_of_a_cpu(verifier: Any, proposal: Proposal, temperature: float) -> None:
    layout, batch, codes = toy.ROW_ENDS, 8, len(toy.CODES)
    generator = torch.Generator().manual_seed(0)
    plan = TreePlan(4, 3, 5, 20)
    sampler = Sampler(layout, range(batch), temperature=temperature)
    start = torch.arange(batch) + layout.start
    noise_window = sampler.noise_window(start, plan.depth + 1)
    tree = grow_tree(
        lambda level: 2 * torch.randn(*level.tokens.shape, codes, generator=generator),
        torch.full((batch,), toy.CODES.start), plan, noise_window, proposal=proposal,
    ).padded(32)  # fmt: skip
    logits = torch.randn(batch, tree.size, codes, generator=generator)
    place = tree.parents.clamp(min=0) * codes + layout.vocab_indices(tree.tokens).clamp(0, codes - 1)
    logits.flatten(1).scatter_add_(1, place, 3.0 * (tree.depths > 0))  # children are likely
    own: AcceptedPath = bound(verifier, "cpu").verify(tree, logits, noise_window)
    there = Sampler(layout, range(batch), temperature=temperature, device="cuda").noise_window(
        start.cuda(), plan.depth + 1
    )
    found: AcceptedPath = bound(verifier, "cuda").verify(moved(tree, "cuda"), logits.cuda(), there)
    width = own.path.shape[1]
    assert own.length.amax() > 1
    assert torch.equal(found.length.cpu(), own.length) and torch.equal(found.next_token.cpu(), own.next_token)
    assert torch.equal(found.path[:, :width].cpu(), own.path)
