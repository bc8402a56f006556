"""The mean of two decoders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_script

from recipes.tiny import average
from underdraw import Pipeline
from underdraw.models.checkpoint import open_checkpoint
from underdraw.nn.weights import load_weights, save_weights


def write(folder: Path, value: float, rows: int = 3, text: str = "{}", kind: str = "underdraw-tiny") -> Path:
    save_weights(folder, {"norm": torch.full((rows,), value)}, {"kind": kind, "progress": {"seconds": value}})
    (folder / "text.json").write_text(text)
    return folder


@pytest.mark.parametrize(("options", "expected"), [((), 2.0), (("--share", "0.25"), 1.5)])
def test_mean_of_two_stages(tmp_path: Path, options: tuple[str, ...], expected: float) -> None:
    before, after = write(tmp_path / "before", 1.0), write(tmp_path / "after", 3.0)
    done = run_script(average, str(before), str(after), "--out", str(tmp_path / "mean"), *options)
    assert done.code == 0, done.err
    weights, about = load_weights(tmp_path / "mean")
    assert weights["norm"].tolist() == [expected] * 3
    share = float(options[1]) if options else 0.5
    assert (tmp_path / "mean" / "text.json").read_text() == "{}"
    assert about == {
        "kind": "underdraw-tiny",
        "progress": {"seconds": 3.0, "averaged": share, "before": {"seconds": 1.0}},
    }


@pytest.mark.parametrize(
    ("other", "words"),
    [({"rows": 4}, "other shapes"), ({"kind": "drafter"}, "settings"), ({"text": "[]"}, "read captions differently")],
)
def test_other_decoders_are_refused(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    before, after = write(tmp_path / "before", 1.0), write(tmp_path / "after", 3.0, **other)
    done = run_script(average, str(before), str(after), "--out", str(tmp_path / "mean"))
    assert done.code == 2 and words in done.err and not (tmp_path / "mean").exists()


def test_mean_of_checkpoints_draws(tmp_path: Path) -> None:
    """The embedded model's decoder averaged with itself loads, and draws the same picture."""
    checkpoint, decoder = tmp_path / "tiny", open_checkpoint("tiny").path / "decoder"
    shutil.copytree(decoder.parent, checkpoint)
    shutil.rmtree(checkpoint / "decoder")
    done = run_script(average, str(decoder), str(decoder), "--out", str(checkpoint / "decoder"))
    assert done.code == 0, done.err
    pipes = [Pipeline.from_pretrained(str(model), tree="none") for model in (checkpoint, "tiny")]
    ours, theirs = (pipe("a fox", seed=1, output_type="codes").images for pipe in pipes)
    assert torch.equal(ours, theirs)
