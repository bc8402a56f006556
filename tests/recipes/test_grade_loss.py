"""The decoder's loss on composed pictures, and the command that adds it to a model's statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
import sprite_pack
import torch
from commands import run_script

from recipes.tiny import grade_loss
from recipes.tiny.compose import Composer, Painter, Recipe
from recipes.tiny.grade_loss import losses
from recipes.tiny.multi_token_loss import Scorer
from underdraw import Pipeline


def test_losses_of_a_random_model(tmp_path: Path) -> None:
    """Captions and subjects make little difference, and a code costs about what guessing does."""
    pack = sprite_pack.write(tmp_path / "pack.bin")
    model = Pipeline.from_pretrained(
        small_checkpoint.write(tmp_path / "model", side=32, drafter=False, length=99)
    ).model
    found = losses(model, pack, 3)
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
        assert (
            0.5 * np.log(small_checkpoint.IMAGES.codes)
            < found[split]["loss"]
            < 4 * np.log(small_checkpoint.IMAGES.codes)
        )


def test_command_adds_the_loss_to_a_statistics_file(tmp_path: Path) -> None:
    pack = sprite_pack.write(tmp_path / "pack.bin")
    model = small_checkpoint.write(tmp_path / "model", side=32, drafter=False, length=99)
    path = tmp_path / "statistics.json"
    path.write_text('{"kind": "statistics", "loss": null, "prompts": 2}')
    options = ["--pack", pack.path, "--model", model, "--into", path]
    done = run_script(grade_loss, *options, "--count", 2)
    assert done.code == 0, done.err
    record = json.loads(path.read_text())
    assert record["prompts"] == 2 and set(record["loss"]) == {"train", "held-out"}
    assert "nats per code" in done.out
    path.write_text('{"kind": "targets"}')
    done = run_script(grade_loss, *options)
    assert done.code == 2 and "run that first" in done.err and done.err.count("\n") == 1
