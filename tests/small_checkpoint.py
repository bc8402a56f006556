"""Writes a very small checkpoint of the tiny family with random weights: 6 x 6 codes of 2 x 2 pixels."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import toy_models

from recipes.tiny.train_decoder import decoder_metadata
from underdraw.drafters.eagle import Eagle
from underdraw.drafters.trained import SHARED_WEIGHTS, build_net, save_drafter
from underdraw.layout import Layout
from underdraw.models.tiny import tiny_arch
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Transformer
from underdraw.nn.weights import save_weights
from underdraw.tokenizers.fsq import FSQArch, FSQTokenizer, save_tokenizer
from underdraw.tokenizers.text import TextTokenizer

IMAGES = FSQArch(
    levels=(8, 8, 4), encoder_widths=(16, 16), encoder_blocks=(0, 1), decoder_widths=(16, 16), decoder_blocks=(1, 1)
)
SIDE = 6  # codes
PIXELS = 2 * SIDE
TOKENS = SIDE**2 - 1  # sampled by decode passes; the first token comes from the prefill
WORDS = (" fox", " red", " blue", " ghost", " render", " purple", " background")


def write(
    folder: Path, *, side: int = SIDE, drafter: bool = True, words: Sequence[str] = WORDS, length: int = 24
) -> Path:
    """Write the checkpoint; the same bytes every time."""
    text = TextTokenizer([], list(words), max_length=length)
    layout = Layout(side, side, range(text.size, text.size + IMAGES.codes))
    net = Transformer(tiny_arch(text.size, IMAGES.codes, dim=64, layers=1))
    toy_models.randomise(net, 3, head=2.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        images = FSQTokenizer(IMAGES)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "underdraw-tiny"}))
    save_tokenizer(folder / "tokenizer", images, {})
    save_weights(folder / "decoder", net.state_dict(), decoder_metadata(net, layout, text, {}))
    text.save(folder / "decoder" / "text.json")
    if drafter:
        target = DecoderTarget(net)
        sizes = {"layers": 1, "ffn": 64, "above": True}
        head = build_net(target, "eagle", sizes)
        for name, parameter in head.named_parameters():
            if not name.startswith(SHARED_WEIGHTS):
                torch.nn.init.constant_(parameter, float("norm" in name))
        toy_models.randomise(head.fc, 1)
        toy_models.randomise(head.body.blocks, 1)
        save_drafter(folder / "drafter", Eagle(head), target, sizes, {})
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
