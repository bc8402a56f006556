"""The kernels for few nodes on a device, in the type that they are made for."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("index", range(4))
def test_a_slim_layer_is_the_layer(index: int, pairing: Literal["half", "interleaved"]) -> None:
    import slimming

    options: dict[str, Any] = slimming.ARCHES[index]
    slimming.check(options, pairing, torch.device("cuda"), torch.bfloat16, 3e-2)
