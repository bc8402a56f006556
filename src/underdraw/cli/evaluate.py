"""`underdraw evaluate`: quality metrics of images, and comparison of two folders or two images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from underdraw.cli import options
from underdraw.cli.progress import open_bar
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw evaluate fast --against plain

underdraw evaluate fast.png --against plain.png

underdraw evaluate fast --metrics clip,aesthetic --weights weights

underdraw evaluate fast --against photos --metrics fid,is,pr --weights weights --json
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER|FILE", help="A folder written by underdraw generate --prompts, or one image."),
]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER|FILE",
        help="The other folder or image. For fid and pr any folder of images.",
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Comma-separated: exact (identical images), test (do the codes have the same distribution?), fid, is, pr "
        "(precision, recall), clip, hps, aesthetic. Default: exact, and test from 4 images on.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        envvar="UNDERDRAW_WEIGHTS",
        help="Folder of the metrics' published weights; a missing file is named with its source.",
    ),
]


@app.command(epilog=EXAMPLES)
@options.grouped
def evaluate(
    folder: Folder,
    against: Against = None,
    metrics: Metrics = None,
    weights: Weights = None,
    *,
    output: options.OutputOptions,
) -> None:
    """Compare images (identical? same distribution?) or score them: FID, Inception Score, precision, CLIP, HPSv2."""
    if metrics is None and against is None:
        raise ConfigError("there is nothing to compare with; give --against, or choose metrics with --metrics.")
    from underdraw.metrics.image_quality import Evaluation
    from underdraw.metrics.image_quality import evaluate as compute

    names = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    evaluation = Evaluation(folder, against, names, weights)
    evaluation.check()
    with open_bar(evaluation.network_images(), "image", silent=output.silent) as bar:
        record = compute(evaluation, bar.update)
    output.print("\n".join(_lines(record)), record)


def _lines(record: dict[str, Any]) -> list[str]:
    """The record for people."""
    lines = [f"{record['folder']}: {record['pictures']} images"]
    if "joined" in record:
        unpaired = record["only_here"] + record["only_there"]
        lines.append(f"  paired with {record['against']} by index: {record['joined']}, {unpaired} only on one side")
    if "exact" in record:
        exact = record["exact"]
        codes = f", {100 * exact['equal_codes']:.2f} % of codes equal" if "equal_codes" in exact else ""
        lines.append(f"  identical images: {exact['identical']} of {exact['pictures']}{codes}")
    if "test" in record:
        p = record["test"]["p"]
        verdict = "different distributions" if p < 0.01 else "no difference between the distributions was found"
        lines.append(f"  two-sample test: MMD {record['test']['mmd']:.5f}, p = {p:.4g}: {verdict}")
    if "test_skipped" in record:
        lines.append(f"  two-sample test: skipped, {record['test_skipped']}")
    for name in ("fid", "is", "pr", "clip", "hps", "aesthetic"):
        if name in record:
            value = record[name]
            text = ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else value
            lines.append(f"  {name}: {text}")
    return lines
