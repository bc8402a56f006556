"""Every family's checkpoint loads with quantised weights, decodes exactly, and is saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import ParityCase

from underdraw.nn.quantization import quantized_linears
from underdraw.pipeline import Pipeline

CASES = (
    ("anole", "int8"),
    ("lumina", "fp8"),
    ("t2i", "int4"),
    ("c2i", "int8"),
    ("converted", "int8"),
    ("janus", "int4"),
    ("emu3", "fp8"),
    ("glm_image", "int8"),
)
PROMPTS = {"c2i": "goldfish"}
SIZES = {"glm_image": {"height": 96, "width": 128}}


def codes(pipe: Pipeline, name: str) -> torch.Tensor:
    options: dict[str, Any] = SIZES.get(name, {})
    out = pipe(PROMPTS.get(name, "a red fox"), seed=3, temperature=1.0, output_type="codes", **options)
    return out.images  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_quantised_family(request: pytest.FixtureRequest, tmp_path: Path, name: str, weights: Any) -> None:
    case: ParityCase = request.getfixturevalue(name)
    pipe = Pipeline.from_pretrained(case.path, drafter="jacobi", tree="chain:depth=5", weights=weights)
    linears = quantized_linears(pipe.model.target.net)
    assert pipe.weights == weights and linears
    full = case.model.target.net.state_dict()
    for layer, block in enumerate(pipe.model.target.net.blocks):
        for part in ("qkv", "out", "gate_up", "down"):
            weight, matrix = getattr(block, part).weight, full[f"blocks.{layer}.{part}.weight"]
            if not isinstance(weight, torch.Tensor):
                assert (weight.unpack().dequantize() - matrix).norm() < 0.15 * matrix.norm(), part
    drawn = codes(pipe, name)
    assert torch.equal(codes(pipe.plain(), name), drawn)
    again = Pipeline.from_pretrained(pipe.save_pretrained(tmp_path / "saved"))
    assert again.weights == weights
    for one, other in zip(linears, quantized_linears(again.model.target.net), strict=True):
        assert torch.equal(one.values, other.values) and torch.equal(one.scale, other.scale)
    assert torch.equal(codes(again, name), drawn)
