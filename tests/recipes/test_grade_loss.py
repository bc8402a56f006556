"""The decoder's loss on composed images, and the command that adds it to a model's statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
import torch
from commands import run_script

from recipes.tiny import grade_loss
from recipes.tiny.compose import Composer, SceneConfig
from recipes.tiny.data import Pack
from recipes.tiny.grade_loss import composed_losses
from recipes.tiny.multi_token_loss import NextTokenLoss
from recipes.tiny.paint import Painter
from underdraw import Pipeline


def test_loss_of_a_random_model(pack: Pack, tmp_path: Path) -> None:
    """The loss is that of training; captions and subjects make little difference, and it is about that of guessing."""
    folder = small_checkpoint.write(tmp_path / "model", side=32, drafter=False, length=99)
    model = Pipeline.from_pretrained(folder).model
    losses = composed_losses(model, pack, 3)
    composer = Composer(pack, "train", SceneConfig(), 2)
    scenes = composer.draw(3, np.random.default_rng(1))
    codes = model.image_tokenizer.encode(Painter(pack, "cpu", cell=2).paint(scenes)).flatten(1)
    with torch.no_grad():
        prompts = [model.make_prompt(text, None, model.sizes[0]) for text in composer.captions(scenes)]
        ids = torch.tensor([prompt.condition for prompt in prompts])
        training = NextTokenLoss(model.target.net, model.make_layout(model.sizes[0]), ids.shape[1])(ids, codes)
    assert losses["train"]["loss"] == pytest.approx(float(training.mean()), abs=2e-3)
    guessing = np.log(small_checkpoint.IMAGES.codes)
    for split in ("train", "held-out"):
        assert losses[split]["pictures"] == 3
        assert losses[split]["loss"] == pytest.approx(losses[split]["without_caption"], rel=0.1)
        assert 0.5 * guessing < losses[split]["loss"] < 4 * guessing


def test_command_adds_the_loss_to_a_statistics_file(pack: Pack, tmp_path: Path) -> None:
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
