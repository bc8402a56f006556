"""`underdraw plot`: the figures and the report of a benchmark, and the pages of documents that show them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from underdraw.cli import options
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw plot benchmarks/results/paper-main

underdraw plot --page docs/experiments.md
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Folder = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="The folder that `underdraw bench --out` has written.")
]
Page = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=options.OUTPUT,
        help="A Markdown page: what stands between its markers is made anew from the results that they name.",
    ),
]  # fmt: skip


@app.command(epilog=EXAMPLES)
def plot(run: Folder = None, page: Page = None, json: options.Json = False, quiet: options.Quiet = False) -> None:
    """Draw every figure of a run as PNG and SVG, and write one HTML report with tables and figures."""
    if (run is None) == (page is None):
        raise ConfigError("give either the folder of a run or --page FILE; see underdraw plot --help.")
    if page is not None:
        from underdraw.bench.page import renew

        changed = renew(page)
        told = "made anew" if changed else "as it was"
        print_result(f"{page}: {told}", {"page": str(page), "changed": changed}, as_json=json, quiet=quiet)
        return
    assert run is not None
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder; name the one that `underdraw bench --out` has written.")
    from underdraw.bench.report import write_report

    files = write_report(run)
    record = {"run": str(run), "files": [str(file) for file in files]}
    print_result(f"{files[-1]}: {len(files) - 1} figures", record, as_json=json, quiet=quiet)
