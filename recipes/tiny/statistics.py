"""Loss of the tiny decoder on composed pictures: `python -m recipes.tiny.statistics --pack FILE --into JSON`.

`underdraw evaluate statistics --out JSON` measures everything that needs no training data; this adds the `loss` of the
same model to that file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn import functional as F

from recipes.tiny.compose import Composer, Painter, Recipe
from recipes.tiny.data import Pack, Split
from underdraw.io import atomic_write_json, read_json
from underdraw.models.family import LoadedModel
from underdraw.training.samples import prompts_of, raster_of, shortened
from underdraw.training.teacher import Teacher

BATCH = 8
SPLITS: tuple[Split, ...] = ("train", "held-out")
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@torch.inference_mode()
def composed_losses(model: LoadedModel, pack: Pack, count: int, seed: int = 1) -> dict[str, dict[str, float]]:
    """Nats per code on composed pictures of training and of held-out subjects, with and without their captions."""
    return {split: _split_loss(model, pack, split, count, seed) for split in SPLITS}


def _split_loss(model: LoadedModel, pack: Pack, split: Split, count: int, seed: int) -> dict[str, float]:
    device, cell = model.placement.device, model.image_tokenizer.downsample
    composer = Composer(pack, split, Recipe(), cell)
    scenes = composer.draw(count, np.random.default_rng(seed))
    sprites = np.unique(np.concatenate([scenes.rows.ravel(), scenes.backdrop]))
    pixels = Painter(pack, device, sprites[sprites >= 0], cell).paint(scenes)
    captions = [shortened(model, text) for text in composer.captions(scenes)]
    teacher = Teacher(model.target, model.make_layout(model.sizes[0]), 2)
    layout = teacher.layout
    total = {"loss": 0.0, "without_caption": 0.0}
    for start in range(0, count, BATCH):
        batch = slice(start, start + BATCH)
        codes = torch.cat([model.image_tokenizer.encode(picture) for picture in pixels[batch].split(1)])
        lesson = teacher.lesson(prompts_of(model, captions[batch]), raster_of(layout, codes))
        steps = torch.arange(layout.start, layout.stop, device=device)
        steps = steps[~layout.is_row_end(steps)].expand(len(codes), -1)
        for name, guidance in (("loss", 1.0), ("without_caption", 0.0)):
            logits = lesson.logits(model.target.net, steps, torch.tensor(guidance, device=device))
            loss = F.cross_entropy(logits.float().flatten(0, 1), codes.flatten(), reduction="sum")
            total[name] += float(loss) / steps.shape[1]
    return {"pictures": count, **{name: round(value / count, 4) for name, value in total.items()}}


@app.command()
def statistics(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="The training pack.")],
    into: Annotated[Path, typer.Option(metavar="JSON", help="A file written by underdraw evaluate statistics.")],
    pictures: Annotated[int, typer.Option(metavar="COUNT", help="Composed pictures per split.")] = 32,
    model: Annotated[str, typer.Option("--model", "-m", metavar="MODEL")] = "tiny",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE")] = "auto",
) -> None:
    """Add the loss on composed pictures to the statistics of a model."""
    from underdraw.pipeline import Pipeline

    record: dict[str, Any] = read_json(into, "the statistics of a model")
    loaded = Pipeline.from_pretrained(model, device=device).model
    record["loss"] = composed_losses(loaded, Pack(pack), pictures)
    atomic_write_json(into, record)


if __name__ == "__main__":
    app()
