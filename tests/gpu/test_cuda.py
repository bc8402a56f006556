"""Decoding on a CUDA device: the CPU's noise, and in float32 the images of plain decoding."""

from __future__ import annotations

import pytest
import torch
import toy_models

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.registry import policies
from underdraw.sampling import gumbel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_noise_equals_that_of_the_cpu() -> None:
    seeds, steps = torch.tensor([0, 7, 2**61]), torch.arange(40).expand(3, 40)
    assert torch.equal(gumbel(seeds, steps, 8192), gumbel(seeds.cuda(), steps.cuda(), 8192).cpu())


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3, 4)], ids=["one", "four"])
@pytest.mark.parametrize("policy", ["static", "adjacency:init=both"])
def test_speculative_equals_plain(layout: object, temperature: float, seeds: tuple[int, ...], policy: str) -> None:
    of = toy_models.target(device="cuda")
    settings = {"layout": layout, "temperature": temperature, "seeds": seeds, "guidance": 2.0}
    expected = toy_models.plain_tokens(of, **settings)
    for drafter in (toy_models.eagle(of, above=True), toy_models.block(of), SmallModel(of), Jacobi(), Neighbour()):
        assert torch.equal(toy_models.run_decode(of, drafter, policies.build(policy), **settings)[0], expected)  # type: ignore[arg-type]
