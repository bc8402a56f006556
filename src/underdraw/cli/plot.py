"""`underdraw plot`: figures and a report of a benchmark, and the generated blocks of documentation pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from underdraw.cli import options
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw plot benchmarks/results/paper-main/cpu

underdraw plot --page docs
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Folder = Annotated[
    Path | None, typer.Argument(metavar="[FOLDER]", help="A folder written by `underdraw bench` or `bench engine`.")
]
Page = Annotated[
    Path | None,
    options.output_option(
        metavar="FILE|FOLDER",
        help="A Markdown page, or a folder of pages: generate the blocks between <!-- results: PATH --> and "
        "<!-- end --> again from the results at PATH.",
    ),
]


@app.command(epilog=EXAMPLES)
@options.grouped
def plot(folder: Folder = None, page: Page = None, *, output: options.OutputOptions) -> None:
    """Draw the figures of a benchmark as PNG and SVG and write an HTML report, or update documentation pages."""
    if (folder is None) == (page is None):
        raise ConfigError("give either the folder of a benchmark or --page; see underdraw plot --help.")
    if page is not None:
        from underdraw.bench.report import find_pages, update_page

        pages = find_pages(page)
        changed = [path for path in pages if update_page(path)]
        record = {"page": str(page), "pages": [str(path) for path in pages], "changed": bool(changed)}
        output.print(f"{page}: {len(changed)} of {len(pages)} pages changed", record)
        return
    assert folder is not None
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name one written by `underdraw bench --out`.")
    from underdraw.bench.report import write_report

    files = write_report(folder)
    record = {"run": str(folder), "files": [str(file) for file in files]}
    output.print(f"{files[-1]}: {len(files) - 1} figures", record)
