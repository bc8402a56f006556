"""The checkpoints that benchmarks/fullsize.py writes, at their small sizes; docs/models.md runs SimpleAR's."""

from __future__ import annotations

from pathlib import Path

import pytest

from underdraw import Pipeline


@pytest.mark.parametrize("name", ["glm_image", "lumina2"])
def test_newer_families_load_and_draw(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is read, none is missing, and a chain draws."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import fullsize_newer

    sizes = fullsize_newer.TINY[name]
    fullsize_newer.WRITERS[name](tmp_path, sizes)
    pipe = Pipeline.from_pretrained(tmp_path, drafter="jacobi", tree="chain:depth=8", device="cpu")
    assert pipe.model.family == name
    codes = pipe("a red fox", seed=1, output_type="codes", height=sizes.side, width=sizes.side).images
    side = sizes.side // pipe.model.image_tokenizer.downsample
    assert codes.shape == (1, side, side) and len(codes.unique()) > 1
