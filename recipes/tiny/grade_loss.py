"""Measures the decoder's loss on composed pictures and adds it to the statistics of the model's card.

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

from recipes.tiny.compose import Composer, Painter, Recipe
from recipes.tiny.data import Pack, Split
from underdraw.cli import options
from underdraw.cli.app import main
from underdraw.errors import ConfigError
from underdraw.io import atomic_write_json, read_json
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.family import LoadedModel
from underdraw.models.loading import load_model, resolve_placement
from underdraw.training.samples import prompts_of, raster_of, shortened
from underdraw.training.teacher import Teacher

BATCH = 8
app = typer.Typer(add_completion=False)


@app.command()
def grade_loss(
    pack: Annotated[Path, typer.Option(help="Training pack.")],
    into: Annotated[Path, typer.Option(help="File that `underdraw evaluate statistics` wrote.")],
    count: Annotated[int, typer.Option(min=1, help="Composed pictures of each split.")] = 32,
    model: options.Model = "tiny",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Measure nats per code on training and held-out subjects, with and without captions."""
    record = read_json(into, "the statistics of a model")
    if not isinstance(record, dict) or record.get("kind") != "statistics":
        raise ConfigError(f"{into} was not written by `underdraw evaluate statistics`; run that first.")
    loaded = load_model(open_checkpoint(model), resolve_placement(device, dtype))
    record["loss"] = losses(loaded, Pack(pack), count)
    atomic_write_json(into, record)
    for split, values in record["loss"].items():
        print(f"{split}: {values['loss']:.3f} nats per code, {values['without_caption']:.3f} without the caption")


@torch.inference_mode()
def losses(model: LoadedModel, pack: Pack, count: int, seed: int = 1) -> dict[str, dict[str, float]]:
    """Nats a code of composed pictures of training and of held-out subjects, with their captions and without."""
    splits: tuple[Split, ...] = ("train", "held-out")
    return {split: _loss(model, pack, split, count, seed) for split in splits}


def _loss(model: LoadedModel, pack: Pack, split: Split, count: int, seed: int) -> dict[str, float]:
    device, cell = model.placement.device, model.image_tokenizer.downsample
    composer = Composer(pack, split, Recipe(), cell)
    scenes = composer.draw(count, np.random.default_rng(seed))
    used = np.unique(np.concatenate([scenes.rows.ravel(), scenes.backdrop]))
    pixels = Painter(pack, device, used[used >= 0], cell).paint(scenes)
    texts = [shortened(model, text) for text in composer.captions(scenes)]
    teacher = Teacher(model.target, model.make_layout(model.sizes[0]), 2)
    layout = teacher.layout
    total = {"loss": 0.0, "without_caption": 0.0}
    for start in range(0, count, BATCH):
        codes = torch.cat([model.image_tokenizer.encode(one) for one in pixels[start : start + BATCH].split(1)])
        lesson = teacher.lesson(prompts_of(model, texts[start : start + BATCH]), raster_of(layout, codes))
        steps = torch.arange(layout.start, layout.stop, device=device)
        steps = steps[~layout.is_row_end(steps)].expand(len(codes), -1)
        for name, guidance in (("loss", 1.0), ("without_caption", 0.0)):
            logits = lesson.logits(model.target.net, steps, torch.tensor(guidance, device=device))
            found = F.cross_entropy(logits.float().flatten(0, 1), codes.flatten(), reduction="sum")
            total[name] += float(found) / steps.shape[1]
    return {"pictures": count, **{name: round(value / count, 4) for name, value in total.items()}}


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.grade_loss"))
