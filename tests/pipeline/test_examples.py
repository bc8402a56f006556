"""Every example is short, runs, and does what its first line says."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
WRITTEN = {"generate": "fox.png", "heatmap": "heatmap.png", "custom_family": "mosaic.png"}
PRINTED = {
    "compare_policies": "5 policies, 1 image",
    "custom_policy": "tokens per pass",
    "generate": "identical pixels",
}


def test_examples_are_complete() -> None:
    assert {"generate", "compare_policies", "heatmap", "custom_policy", "custom_family"} <= {p.stem for p in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(path.read_text().splitlines()) <= 50
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), str(small_model)])
    runpy.run_path(str(path), run_name="__main__")
    assert PRINTED.get(path.stem, "") in capsys.readouterr().out
    if path.stem in WRITTEN:
        assert np.asarray(Image.open(WRITTEN[path.stem])).std() > 1
