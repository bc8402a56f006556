"""Training of the decoder: it learns and writes a model, starts from other codebooks, and predicts later tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from recipes.tiny.compose import Composer
from recipes.tiny.data import Pack
from recipes.tiny.multi_token_loss import MultiTokenLoss, NextTokenLoss
from recipes.tiny.paint import Painter
from recipes.tiny.text_tokenizer import caption_texts, learn_vocabulary
from recipes.tiny.train_decoder import SHEETS, DecoderOptions, DecoderTrainer, initialise, initialise_from
from recipes.tiny.train_tokenizer import SMOKE_ARCH
from underdraw.layout import Layout
from underdraw.models.tiny import tiny_arch
from underdraw.nn.transformer import Transformer
from underdraw.nn.weights import load_weights, save_weights
from underdraw.tokenizers.fsq import FSQTokenizer, save_tokenizer


def make_trainer(pack: Pack, painter: Painter, options: DecoderOptions) -> DecoderTrainer:
    text = learn_vocabulary(caption_texts(pack), size=400)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = FSQTokenizer(SMOKE_ARCH)
    side = pack.px // tokenizer.downsample
    layout = Layout(side, side, range(text.size, text.size + tokenizer.arch.codes))
    net = Transformer(tiny_arch(text.size, tokenizer.arch.codes, dim=64, layers=1))
    initialise(net, 0)
    composers = Composer(pack), Composer(pack, "held-out")
    return DecoderTrainer(net, layout, text, tokenizer, painter, composers, options, ["a t1"])


@pytest.mark.parametrize("future_tokens", [0, 8])
def test_training_learns_and_resumes(future_tokens: int, pack: Pack, painter: Painter, tmp_path: Path) -> None:
    """A few steps lower the loss, the folder loads again, images are generated from it, and training continues."""
    options = DecoderOptions(
        seconds=2.0, pause=1.0, batch=4, warmup=2, learning_rate=3e-3, evaluate_images=4, report_every=0.5,
        future_tokens=future_tokens,
    )  # fmt: skip
    trainer = make_trainer(pack, painter, options)
    before = trainer.measure(trainer.composer, 4, candidates=2)["loss"]
    trainer.train(tmp_path)
    trainer.evaluate(tmp_path, SHEETS)
    assert trainer.measure(trainer.composer, 4, candidates=2)["loss"] < before
    assert (tmp_path / "sheet-g3-k256.png").exists() and (tmp_path / "sheet-g2-k0.png").exists()
    state, about = load_weights(tmp_path)
    Transformer(tiny_arch(about["arch"]["text"], about["arch"]["codes"], dim=64, layers=1)).load_state_dict(state)
    assert about["progress"]["steps"] == trainer.steps
    resumed = make_trainer(pack, painter, dataclasses.replace(options, pause=1.5))
    resumed.resume(tmp_path)
    assert torch.equal(resumed.multi_token.projections, trainer.multi_token.projections)
    assert resumed.steps == trainer.steps and 1 <= resumed.seconds < 1.5
    resumed.train(tmp_path)
    assert resumed.steps > trainer.steps and resumed.seconds >= 1.5


def test_new_codes_start_as_the_nearest_old_ones(pack: Pack, tmp_path: Path) -> None:
    """A tokenizer takes over all weights although its levels differ; so does a decoder, code by code."""
    text = learn_vocabulary(caption_texts(pack), size=400)
    old = FSQTokenizer(SMOKE_ARCH)
    new = FSQTokenizer(dataclasses.replace(SMOKE_ARCH, levels=(4, 3, 3, 3)))
    new.load_state_dict(old.state_dict())
    save_tokenizer(tmp_path / "tokenizer", old, {})
    old_net, new_net = (
        Transformer(tiny_arch(text.size, tokenizer.arch.codes, dim=64, layers=1)) for tokenizer in (old, new)
    )
    initialise(old_net, 0)
    save_weights(tmp_path / "decoder", old_net.state_dict(), {}, "bf16")
    initialise_from(new_net, tmp_path, new.codebook, text.size)
    for index in (0, -1):  # the corners of the box are in both codebooks
        assert torch.equal(new.codebook[index], old.codebook[index])
    for name in ("embedding.weight", "head.weight"):
        new_rows, old_rows = (dict(net.named_parameters())[name].detach() for net in (new_net, old_net))
        assert torch.equal(new_rows[-1], old_rows[-1].bfloat16().float())
    old_text = old_net.embedding.weight[: text.size].bfloat16().float()
    assert torch.equal(new_net.embedding.weight[: text.size], old_text)


def test_multi_token_loss_predicts_later_codes() -> None:
    """With projections of zeros, the loss of a later code is that of the next code's logits."""
    layout = Layout(2, 3, range(5, 13))
    net = Transformer(tiny_arch(5, 8, dim=64, layers=1))
    initialise(net, 0)
    next_token = NextTokenLoss(net, layout, 2)
    text, codes = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3, 2]])
    loss, future = MultiTokenLoss(next_token, 3)(text, codes, torch.tensor([2]))
    assert loss.item() == pytest.approx(next_token(text, codes).mean().item())
    logits = net.logits(next_token.features(text, codes))[:, :-2]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 2:].flatten())
    assert future.item() == pytest.approx(expected.item())
