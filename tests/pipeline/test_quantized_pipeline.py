"""Quantised weights of the embedded family: exact within the quantised model, recorded, saved and loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open

from underdraw import Pipeline
from underdraw.errors import UnderdrawError


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_quantised_pipeline_is_exact_and_saved(small_model: Path, tmp_path: Path, weights: Any) -> None:
    pipe = Pipeline.from_pretrained(small_model, weights=weights, tree="static")
    drawn = pipe("fox", seed=1)
    assert pipe.plain()("fox", seed=1).images[0].tobytes() == drawn.images[0].tobytes()
    assert drawn.settings["weights"] == weights and f"weights='{weights}'" in repr(pipe)
    folder = pipe.save_pretrained(tmp_path / "saved")
    assert json.loads((folder / "underdraw.json").read_text())["weights"] == weights
    with safe_open(folder / "decoder" / "model-0.safetensors", framework="pt") as file:
        stored = str(file.get_tensor("blocks.0.qkv.weight").dtype)
    assert stored == {"int8": "torch.int8", "fp8": "torch.float8_e4m3fn", "int4": "torch.uint8"}[weights]
    again = Pipeline.from_pretrained(folder, weights=weights)
    assert again("fox", seed=1).images[0].tobytes() == drawn.images[0].tobytes()
    for other in {"full", "int8", "fp8", "int4"} - {weights}:
        with pytest.raises(UnderdrawError, match=f"saved with {weights} weights and cannot be loaded with {other}"):
            Pipeline.from_pretrained(folder, weights=other)  # type: ignore[arg-type]


def test_png_records_the_weights(small_model: Path, tmp_path: Path) -> None:
    pipe = Pipeline.from_pretrained(small_model, weights="int8", tree="none")
    pipe("fox", seed=1).save(tmp_path / "fox.png")
    assert "int8" in str(Image.open(tmp_path / "fox.png").info)


def test_fastest_numerics_are_refused(small_model: Path) -> None:
    with pytest.raises(UnderdrawError, match="int8 weights are multiplied by row-invariant kernels"):
        Pipeline.from_pretrained(small_model, weights="int8", numerics="fastest")


def test_quantised_pipeline_moves_to_another_dtype(small_model: Path) -> None:
    pipe = Pipeline.from_pretrained(small_model, weights="int8", tree="none").to(dtype="bfloat16")
    assert pipe.weights == "int8" and pipe("fox", seed=1).complete
