"""`underdraw verify`: draw some images of a run again and compare them byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underdraw.cli import options
from underdraw.cli.progress import RunProgress

if TYPE_CHECKING:
    from underdraw.distributed.verify import Verification

EXAMPLES = """
Examples:

underdraw verify pictures --sample 50

underdraw verify pictures --sample 50 --plain --json
"""
DIFFERENT = 1  # exit code
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that underdraw generate wrote, in any format.")]
Sample = Annotated[int, typer.Option(min=0, metavar="COUNT", help="How many images to draw again; 0 is all of them.")]
SampleSeed = Annotated[int, typer.Option("--seed", metavar="NUMBER", help="Decides which images are drawn again.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="Draw without speculation, which must not change an image with exact verifiers.")
]
Batch = Annotated[int, typer.Option(min=1, max=256, metavar="COUNT", help="How many images are drawn together.")]
OtherModel = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="Where the model is now, if it is no longer where it was."),
]


@app.command(epilog=EXAMPLES)
@options.grouped
def verify(
    run: Run,
    sample: Sample = 50,
    seed: SampleSeed = 0,
    plain: Plain = False,
    batch: Batch = 1,
    model: OtherModel = None,
    device: options.Device = "auto",
    *,
    output: options.OutputOptions,
) -> None:
    """Draw some images of a run again: are they the same, byte for byte? The exit code is 1 if one is not."""
    from underdraw.distributed.verify import check_run, read_run

    stored = read_run(run)
    loading: dict[str, Any] = {**stored.loading, "device": device, **({} if model is None else {"model": model})}
    if plain:
        loading |= {"tree": "none", "drafter": "forced"}
    pipe, _ = options.load_pipeline(**loading, silent=output.silent)
    with RunProgress(silent=output.silent) as progress:
        result = check_run(stored, pipe, sample, seed, batch, on_start=progress.start, on_event=progress.update)
    record = {"run": str(run), "images": result.images, "drawn": result.drawn, "identical": result.identical}
    output.print(_line(run, result), {**record, "different": result.different})
    if result.different:
        raise typer.Exit(DIFFERENT)


def _line(run: Path, result: Verification) -> str:
    line = f"{run}: drew {result.drawn} of {result.images} images again, {result.identical} identical"
    if result.different:
        line += f"; different: {', '.join(map(str, result.different[:10]))}"
    return line
