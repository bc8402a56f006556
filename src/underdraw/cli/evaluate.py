"""`underdraw evaluate`: quality of a folder of pictures, and whether two folders hold the same pictures or one law."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from underdraw.cli import options
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw evaluate fast --against plain

underdraw evaluate fast --metrics clip,aesthetic --weights weights

underdraw evaluate fast --against photos --metrics fid,is,pr --weights weights --json
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Pictures with a manifest, as underdraw generate --prompts writes them."),
]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Another such folder. For fid and pr any folder of pictures will do.",
    ),
]  # fmt: skip
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Any of exact (identical pictures), test (do the codes have one law?), fid, is, pr (precision, recall), "
        "clip, hps, aesthetic, with commas between. Without it, exact,test. The others need weights of other projects.",
    ),
]  # fmt: skip
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", envvar="UNDERDRAW_WEIGHTS",
        help="Where the weights of other projects lie; a missing file is named with its source.",
    ),
]  # fmt: skip


@app.command(epilog=EXAMPLES)
def evaluate(
    folder: Folder,
    against: Against = None,
    metrics: Metrics = None,
    weights: Weights = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure pictures: identical or not, one law or two, FID, Inception Score, precision and recall, CLIP, HPSv2."""
    if metrics is None and against is None:
        raise ConfigError("there is nothing to compare with; give --against FOLDER, or say what to measure: --metrics.")
    from tqdm import tqdm

    from underdraw.metrics.image_quality import Question, looks
    from underdraw.metrics.image_quality import evaluate as answer

    names = [name.strip() for name in (metrics or "exact,test").split(",") if name.strip()]
    question = Question(folder, against, names, weights)
    question.check()
    hidden = json or quiet or not sys.stderr.isatty()
    with tqdm(total=looks(question), unit="image", file=sys.stderr, disable=hidden, leave=False) as bar:
        found = answer(question, lambda count: _advance(bar, count))
    print_result("\n".join(_told(found)), found, as_json=json, quiet=quiet)


def _advance(bar: Any, count: int) -> None:
    bar.update(count)


def _told(found: dict[str, Any]) -> list[str]:
    """The answers for people."""
    lines = [f"{found['folder']}: {found['pictures']} pictures"]
    if "joined" in found:
        left = found["only_here"] + found["only_there"]
        lines.append(f"  joined with {found['against']} by number: {found['joined']}, {left} only on one side")
    if "exact" in found:
        codes = (
            f", {100 * found['exact']['equal_codes']:.2f} % of codes equal" if "equal_codes" in found["exact"] else ""
        )
        lines.append(f"  identical pictures: {found['exact']['identical']} of {found['exact']['pictures']}{codes}")
    if "test" in found:
        p = found["test"]["p"]
        accepted_path = (
            "the codes have different laws" if p < 0.01 else "no difference between the laws of the codes was found"
        )
        lines.append(f"  two-sample test: MMD {found['test']['mmd']:.5f}, p = {p:.4g}: {accepted_path}")
    for name in ("fid", "is", "pr", "clip", "hps", "aesthetic"):
        if name in found:
            value = found[name]
            told = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            lines.append(f"  {name}: {told}")
    return lines
