"""The mean of two decoders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import run_script

from recipes.tiny import average
from underdraw.nn.weights import load_weights, save_weights

ABOUT = {"kind": "underdraw-tiny"}


def write(folder: Path, value: float, rows: int = 3) -> Path:
    save_weights(folder, {"norm": torch.full((rows,), value)}, {**ABOUT, "progress": {"seconds": value}})
    return folder


@pytest.mark.parametrize(("options", "expected"), [((), 2.0), (("--share", "0.25"), 1.5)])
def test_mean_of_two_stages(tmp_path: Path, options: tuple[str, ...], expected: float) -> None:
    before, after = write(tmp_path / "before", 1.0), write(tmp_path / "after", 3.0)
    done = run_script(average, str(before), str(after), "--out", str(tmp_path / "mean"), *options)
    assert done.code == 0, done.err
    weights, about = load_weights(tmp_path / "mean")
    assert weights["norm"].tolist() == [expected] * 3
    share = float(options[1]) if options else 0.5
    assert about == {**ABOUT, "progress": {"seconds": 3.0, "averaged": share, "before": {"seconds": 1.0}}}


def test_other_shapes_are_refused(tmp_path: Path) -> None:
    before, after = write(tmp_path / "before", 1.0), write(tmp_path / "after", 3.0, rows=4)
    done = run_script(average, str(before), str(after), "--out", str(tmp_path / "mean"))
    assert done.code == 2 and "other shapes" in done.err and not (tmp_path / "mean").exists()
