"""Training of the image tokenizer: it learns, resumes, and its consistency loss measures what it should."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from recipes.tiny.compose import Composer
from recipes.tiny.data import Pack
from recipes.tiny.paint import Painter
from recipes.tiny.tokenizer_quality import TokenizerEvaluator
from recipes.tiny.train_tokenizer import (
    SCENES,
    SMOKE_ARCH,
    TokenizerOptions,
    TokenizerTrainer,
    consistency_loss,
    initial_model,
    parse_levels,
)
from underdraw.errors import ConfigError
from underdraw.tokenizers.fsq import FSQTokenizer, load_tokenizer, save_tokenizer


def test_training_learns_and_resumes_exactly(pack: Pack, painter: Painter, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = TokenizerOptions(seconds=1.0, batch=4, warmup=2, learning_rate=4e-3, evaluate_every=0.5)
    evaluator = TokenizerEvaluator(pack, painter, None, SCENES, 8)

    def new_trainer(model: FSQTokenizer) -> TokenizerTrainer:
        return TokenizerTrainer(model, Composer(pack), painter, None, evaluator, options)

    trainer, out = new_trainer(FSQTokenizer(SMOKE_ARCH)), tmp_path / "tokenizer"
    before = evaluator.measure(trainer.ema_model)
    trainer.train(out)
    after = trainer.measure_and_save(out, out / "sheet.png")
    assert after.psnr > before.psnr and 0 <= after.kept <= 1 and 0 <= after.repeated <= 1
    assert (out / "sheet.png").exists()
    model, progress = load_tokenizer(out)
    assert progress == {"steps": trainer.steps, "seconds": round(trainer.seconds)}
    resumed = new_trainer(model)
    resumed.resume(out)
    resumed.train(out)
    assert resumed.steps == trainer.steps  # the budget was spent, so nothing more was trained
    for parameter, other in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(parameter, other)
    trainer.step(1.0)
    resumed.step(1.0)
    states = [list(each.optimizers[0].state.values()) for each in (trainer, resumed)]
    assert all(state["step"] == trainer.steps for each in states for state in each)  # the moments were kept


def test_weights_without_state_start_with_a_warm_up(pack: Pack, painter: Painter, tmp_path: Path) -> None:
    options = TokenizerOptions(seconds=10.0, batch=4, warmup=10)
    evaluator = TokenizerEvaluator(pack, painter, None, SCENES, 4)
    save_tokenizer(tmp_path, FSQTokenizer(SMOKE_ARCH), {"steps": 500, "seconds": 5})
    model = initial_model(dataclasses.replace(SMOKE_ARCH, levels=(4, 4)), tmp_path, None, 0)
    assert model.arch == SMOKE_ARCH  # a folder keeps its architecture
    trainer = TokenizerTrainer(model, Composer(pack), painter, None, evaluator, options)
    trainer.resume(tmp_path)
    assert (trainer.steps, trainer.warm_steps, trainer.seconds) == (500, 0, 5)
    assert trainer.learning_rate(0.5) == pytest.approx(options.learning_rate * 0.5 / 10)


def test_consistency_loss_by_hand() -> None:
    """The distance to a level, to equal neighbours and to the twin; nothing else, and zero for consistent codes."""
    pixels = torch.zeros(2, 3, 16, 16)
    pixels[:, :, :8, :8] = 1.0  # one cell differs from the other three
    latents = torch.tensor([[5.0, 2.0], [2.0, 2.0]])[None, ..., None].repeat(2, 1, 1, 1)
    assert consistency_loss(latents, pixels, 8).item() == 0
    assert consistency_loss(latents + 0.25, pixels, 8).item() == pytest.approx(0.25**2)
    moved = latents.clone()
    moved[:, 0, 1] = 4.0  # differs from the cell below it, one of two such neighbours; its twin moves along
    assert consistency_loss(moved, pixels, 8).item() == pytest.approx((4 - 2) ** 2)
    apart = latents.clone()
    apart[0, 0, 0] = 7.0  # has no equal neighbour, but a twin: one of four cells
    assert consistency_loss(apart, pixels, 8).item() == pytest.approx((7 - 5) ** 2 / 4)


def test_levels_are_parsed() -> None:
    assert parse_levels("8,5,5,5") == (8, 5, 5, 5)
    with pytest.raises(ConfigError, match="--levels 8;5"):
        parse_levels("8;5")
