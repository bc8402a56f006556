"""On a GPU too, exact decoding does not depend on what a drafter returns: NaN, inf, huge and constant logits."""

from __future__ import annotations

import graph_checks
import pytest
import torch
import toy_models
from torture import adversaries

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.registry import policies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("policy", ["chain:depth=4", "static:shape=mc_sim_7b_63", "confidence", "adjacency:nodes=24"])
@pytest.mark.parametrize("spoiled", adversaries.SPOILED)
def test_exact_on_a_gpu(spoiled: str, policy: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_models.target(device="cuda")
    expected = toy_models.plain_tokens(target, seeds=(4, 5), guidance=2.0)
    for name in ("eagle-above", "block"):
        graphs = GraphCache(span_multiple=64) if captured else None
        drafter = graph_checks.make_drafter(name, target)
        with adversaries.spoiled_logits(spoiled, monkeypatch):
            for _ in range(2):
                tokens = toy_models.run_decode(
                    target, drafter, policies.build(policy), seeds=(4, 5), guidance=2.0, graphs=graphs
                )[0]
                assert torch.equal(tokens, expected)


@pytest.mark.parametrize("columns", [33, 1000, 4096])
def test_indices_of_the_top_k_kernel_stay_in_the_row(columns: int) -> None:
    from underdraw.kernels.topk import topk  # Triton may be missing where tests are only collected

    scores = torch.randn(64, columns, device="cuda")
    scores[::2, ::3] = torch.nan
    scores[1] = torch.nan
    values, indices = topk(scores, 8)
    assert ((indices >= 0) & (indices < columns)).all()
    assert not values.isnan().any(), "NaN ranks last, as -inf"
