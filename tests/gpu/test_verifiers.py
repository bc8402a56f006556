"""Verifiers other than `exact` on a GPU: the tokens of eager passes when captured, and the accepted paths of a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graph_checks
import pytest
import torch
import toy_models

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


def bind(verifier: Any, device: str) -> Any:
    codebook = torch.randn(len(toy_models.CODES), 4, generator=torch.Generator().manual_seed(1))
    return verifier.bind(codebook.to(device)) if isinstance(verifier, Lantern) else verifier


@pytest.mark.parametrize(("verifier", "proposal", "temperature"), CASES, ids=IDS)
@pytest.mark.parametrize("tree", ["chain:depth=3", "adjacency:nodes=12,d_max=6"])
def test_captured_passes_equal_eager_passes(verifier: Any, proposal: Proposal, temperature: float, tree: str) -> None:
    target, cache = toy_models.target(device="cuda"), GraphCache()
    parts = target, toy_models.eagle(target, above=True), policies.build(tree)
    settings: dict[str, Any] = {
        "verifier": bind(verifier, "cuda"),
        "proposal": proposal,
        "temperature": temperature,
        "seeds": (4, 5),
        "layout": toy_models.ROW_ENDS,
    }
    expected = toy_models.run_decode(*parts, **settings)[0]
    for _ in range(2):
        assert torch.equal(toy_models.run_decode(*parts, graphs=cache, **settings)[0], expected)
    assert graph_checks.count_captured(cache) >= 1


def move_tree(tree: DraftTree, device: str) -> DraftTree:
    parts = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "ancestors", "ranks", "q")}
    return replace(tree, **{name: None if part is None else part.to(device) for name, part in parts.items()})


@pytest.mark.parametrize(("verifier", "proposal", "temperature"), CASES, ids=IDS)
def test_accepted_paths_equal_those_of_a_cpu(verifier: Any, proposal: Proposal, temperature: float) -> None:
    layout, batch, codes = toy_models.ROW_ENDS, 8, len(toy_models.CODES)
    generator = torch.Generator().manual_seed(0)
    plan = TreePlan(4, 3, 5, 20)
    sampler = Sampler(layout, range(batch), temperature=temperature)
    start = torch.arange(batch) + layout.start
    noise_window = sampler.noise_window(start, plan.depth + 1)
    tree = grow_tree(
        lambda level: 2 * torch.randn(*level.tokens.shape, codes, generator=generator),
        torch.full((batch,), toy_models.CODES.start), plan, noise_window, proposal=proposal,
    ).padded(32)  # fmt: skip
    logits = torch.randn(batch, tree.size, codes, generator=generator)
    child_index = tree.parents.clamp(min=0) * codes + layout.vocab_indices(tree.tokens).clamp(0, codes - 1)
    logits.flatten(1).scatter_add_(1, child_index, 3.0 * (tree.depths > 0))  # children are likely
    on_cpu: AcceptedPath = bind(verifier, "cpu").verify(tree, logits, noise_window)
    cuda_window = Sampler(layout, range(batch), temperature=temperature, device="cuda").noise_window(
        start.cuda(), plan.depth + 1
    )
    on_gpu: AcceptedPath = bind(verifier, "cuda").verify(move_tree(tree, "cuda"), logits.cuda(), cuda_window)
    width = on_cpu.path.shape[1]
    assert on_cpu.length.amax() > 1
    assert torch.equal(on_gpu.length.cpu(), on_cpu.length) and torch.equal(on_gpu.next_token.cpu(), on_cpu.next_token)
    assert torch.equal(on_gpu.path[:, :width].cpu(), on_cpu.path)
