"""Kernels of GPUs, by triton's interpreter where triton is installed: what torch gives without them."""

from __future__ import annotations

from importlib.util import find_spec

import attending
import interpreted
import pytest
import torch

from underdraw.nn.attention import seen

ATTENTION = """
import torch
from underdraw.kernels.tree_attention import attend_split
import attending

for case in attending.CASES:
    attending.check(case, attend_split, torch.device("cpu"), torch.float32, 1e-5)
"""
SELECTION = """
import torch
import selecting

for case in selecting.CASES:
    selecting.check(*case, torch.device("cpu"))
"""
LAYER = """
import torch
import slimming

for options in slimming.ARCHES:
    for pairing in ("half", "interleaved"):
        for count in (3, 20):
            slimming.check(options, pairing, count, torch.device("cpu"), torch.float32, 1e-5)
for shape in slimming.SHAPES:
    for rows in (1, 2, 19):
        slimming.products(shape, rows, torch.device("cpu"), torch.float32, 1e-5)
"""


@pytest.mark.parametrize("case", attending.CASES, ids=str)
def test_what_is_seen_is_committed_or_an_ancestor(case: attending.Case) -> None:
    ancestors, mask = case.trees()
    slots, ends = torch.arange(1, case.length + 1), torch.tensor([True, False])
    bias = seen(ancestors, torch.tensor(case.committed), slots, ends, torch.tensor([0.0, -torch.inf]))
    assert torch.equal(bias, torch.where(mask, 0.0, -torch.inf))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("program", [ATTENTION, SELECTION, LAYER], ids=["attention", "selection", "layer"])
def test_kernels_give_what_torch_gives(program: str) -> None:
    interpreted.run(program)
