"""Measures the decoder's loss on composed images and adds it to the statistics of the model's card.

underdraw evaluate statistics --prompts benchmarks/prompts64.txt --out statistics.json
python -m recipes.tiny.grade_loss --pack pack192.bin --into statistics.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch.nn import functional as F

from recipes.tiny.compose import Composer, SceneConfig
from recipes.tiny.data import Pack, Split
from recipes.tiny.paint import Painter
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.errors import ConfigError
from underdraw.io import atomic_write_json, read_json
from underdraw.models.family import LoadedModel
from underdraw.training.batches import FeatureExtractor
from underdraw.training.samples import codes_to_tokens, shorten

BATCH = 8
SPLITS: tuple[Split, ...] = ("train", "held-out")
app = typer.Typer(add_completion=False)


@app.command()
def grade_loss(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    into: Annotated[Path, typer.Option(metavar="JSON", help="File that `underdraw evaluate statistics` wrote.")],
    count: Annotated[int, typer.Option("--count", min=1, metavar="COUNT", help="Images of each split.")] = 32,
    model: options.Model = "tiny",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Measure nats per code on training and held-out subjects, with and without captions."""
    record = read_json(into, "statistics of a model")
    if not isinstance(record, dict) or record.get("kind") != "statistics":
        raise ConfigError(f"{into} was not written by `underdraw evaluate statistics`; run that first.")
    record["loss"] = composed_losses(cli.load_target(model, device, dtype), Pack(pack), count)
    atomic_write_json(into, record)
    for split, values in record["loss"].items():
        print(f"{split}: {values['loss']:.3f} nats per code, {values['without_caption']:.3f} without the caption")


def composed_losses(model: LoadedModel, pack: Pack, count: int, seed: int = 1) -> dict[str, dict[str, float]]:
    """By split, nats per code of `count` composed images, with and without their captions."""
    return {split: _split_losses(model, pack, split, count, seed) for split in SPLITS}


@torch.inference_mode()
def _split_losses(model: LoadedModel, pack: Pack, split: Split, count: int, seed: int) -> dict[str, float]:
    device, cell = model.placement.device, model.image_tokenizer.downsample
    composer = Composer(pack, split, SceneConfig(), cell)
    scenes = composer.draw(count, np.random.default_rng(seed))
    rows = np.unique(np.concatenate([scenes.rows.ravel(), scenes.backdrop]))
    pixels = Painter(pack, device, rows[rows >= 0], cell).paint(scenes)
    texts = [shorten(model, text) for text in composer.captions(scenes)]
    layout = model.make_layout(model.sizes[0])
    extractor = FeatureExtractor(model.target, layout, copies=2)
    totals = {"loss": 0.0, "without_caption": 0.0}
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        codes = torch.cat([model.image_tokenizer.encode(image) for image in pixels[part].split(1)])
        prompts = [model.make_prompt(text, "", model.sizes[0]) for text in texts[part]]
        batch = extractor.batch(prompts, codes_to_tokens(layout, codes))
        steps = torch.arange(layout.start, layout.stop, device=device)
        steps = steps[~layout.is_row_end(steps)].expand(len(codes), -1)
        for name, guidance in (("loss", 1.0), ("without_caption", 0.0)):
            logits = batch.target_logits(model.target.net, steps, torch.tensor(guidance, device=device))
            total = F.cross_entropy(logits.float().flatten(0, 1), codes.flatten(), reduction="sum")
            totals[name] += float(total) / steps.shape[1]
    return {"pictures": count, **{name: round(value / count, 4) for name, value in totals.items()}}


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.grade_loss"))
