"""`underdraw generate` on a GPU, with compiled, captured and eager passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
from commands import call  # imports typer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compile", ["on", "capture", "off"])
def test_generate_writes_an_image_and_reports_memory(compile: str, small_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "fox.png"
    words = ("-m", small_model, "-o", out, "--seed", 7, "--compile", compile, "--tree", "chain:depth=3", "--json")
    record = call("generate", "a red fox", *words, "--compare").record
    assert out.exists() and record["settings"]["dtype"] == "bfloat16"
    assert record["peak_device_bytes"] >= record["load"]["peak_device_bytes"] >= record["load"]["weight_bytes"] > 0


def test_auto_tree_measures_and_stores_costs(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERDRAW_CACHE", str(tmp_path))
    assert call("generate", "a red fox", "-m", small_model, "-o", tmp_path / "a.png", "--json").record["tokens"] > 0
    assert torch.cuda.get_device_name() in (tmp_path / "costs.json").read_text()
