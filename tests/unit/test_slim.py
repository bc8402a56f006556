"""A GPU's kernels for few nodes, by triton's interpreter where triton is installed: what the layer gives as it is."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from interpreted import run

PROGRAM = """
import torch
import slimming

for options in slimming.ARCHES:
    for pairing in ("half", "interleaved"):
        slimming.check(options, pairing, torch.device("cpu"), torch.float32, 1e-5)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_a_slim_layer_is_the_layer() -> None:
    run(PROGRAM)
