"""Loss of a decoder on composed pictures of the training pack."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small
import sprites
import torch
from typer.testing import CliRunner

from recipes.tiny.compose import Composer, Painter, Recipe
from recipes.tiny.multi_token_loss import Scorer
from recipes.tiny.statistics import app, composed_losses
from underdraw import Pipeline


def test_losses_of_random_model_match_training_loss(tmp_path: Path) -> None:
    """It knows nothing, so captions and subjects make little difference, and a code costs about what guessing does."""
    pack = sprites.write(tmp_path / "pack.bin")
    model = Pipeline.from_pretrained(small.write(tmp_path / "model", side=32, drafter=False, length=99)).model
    found = composed_losses(model, pack, 3)
    scenes = Composer(pack, "train", Recipe(), 2).draw(3, np.random.default_rng(1))
    texts = Composer(pack, "train", Recipe(), 2).captions(scenes)
    codes = model.image_tokenizer.encode(Painter(pack, "cpu", cell=2).paint(scenes)).flatten(1)
    with torch.no_grad():  # as training measures it
        ids = torch.tensor([model.make_prompt(text, None, model.sizes[0]).condition for text in texts])
        scored = Scorer(model.target.net, model.make_layout(model.sizes[0]), ids.shape[1])(ids, codes)
    assert found["train"]["loss"] == pytest.approx(float(scored.mean()), abs=2e-3)
    for split in ("train", "held-out"):
        assert found[split]["pictures"] == 3
        assert found[split]["loss"] == pytest.approx(found[split]["without_caption"], rel=0.1)
        assert 0.5 * np.log(small.IMAGES.codes) < found[split]["loss"] < 4 * np.log(small.IMAGES.codes)


def test_command_adds_loss_to_statistics_file(tmp_path: Path) -> None:
    sprites.write(tmp_path / "pack.bin")
    small.write(tmp_path / "model", side=32, drafter=False, length=99)
    record = tmp_path / "statistics.json"
    record.write_text('{"kind": "statistics", "loss": null}')
    options = ["--pack", "pack.bin", "--into", "statistics.json", "--model", "model", "--pictures", "2"]
    paths = {"pack.bin", "statistics.json", "model"}
    result = CliRunner().invoke(app, [str(tmp_path / word) if word in paths else word for word in options])
    assert result.exit_code == 0, result.output
    written = json.loads(record.read_text())
    assert written["kind"] == "statistics" and written["loss"]["train"]["pictures"] == 2
