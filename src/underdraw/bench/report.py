"""Sections as Markdown, HTML and terminal output; the report of a result, and the generated blocks of pages.

A block is everything between `<!-- results: PATH -->` and `<!-- end -->`; PATH is relative to the page. `PATH#kinds`
is the speed by kind of image alone, `PATH#aims` the engine results against their aims.
"""

from __future__ import annotations

import base64
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from underdraw.bench.engine_tables import aims_sections
from underdraw.bench.figures import FigureData, draw_engine_figures, draw_run_figures
from underdraw.bench.kinds import kinds_sections
from underdraw.bench.presets import PRESETS
from underdraw.bench.records import engine_folder_sections, engine_records, read_record, record_sections
from underdraw.bench.results import RUN
from underdraw.bench.sections import FIGURE_TITLES, FIGURES, Section, Table, index_sections, run_sections
from underdraw.bench.summary import SUMMARY, read_summary
from underdraw.errors import ConfigError
from underdraw.extras import require_package
from underdraw.io import atomic_write_text, read_json, read_text

REPORT = "report.html"
_PAGE_COLUMNS = 150
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.S)
TEMPLATE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>underdraw bench: {{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 } th, td { padding: .2rem .6rem; text-align: right }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% } .note { color: #555; font-size: 13px }
</style>
<h1>{{ title }}</h1>
{% for section in sections %}
{% if section.heading %}<h2>{{ section.heading }}</h2>{% endif %}
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.table %}<table>
<tr>{% for column in section.table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in section.table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endif %}
{% if section.note %}<p class="note">{{ section.note }}</p>{% endif %}
{% if section.figure %}<h2>{{ titles[section.figure.stem] }}</h2>
<img alt="{{ titles[section.figure.stem] }}" src="data:image/png;base64,{{ encode(section.figure) }}">{% endif %}
{% endfor %}
</html>
"""


def markdown_table(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def to_markdown(sections: Sequence[Section], base: Path | None = None) -> str:
    """Sections as Markdown; links to figures are relative to `base`."""
    parts = []
    for section in sections:
        if section.only_in_report:
            continue
        parts += [f"### {section.heading}"] if section.heading else []
        parts += [
            _wrapped(section.text),
            markdown_table(section.table) if section.table else "",
            _wrapped(section.note),
        ]
        if section.figure:
            link = Path(os.path.relpath(section.figure, base)).as_posix() if base else section.figure.as_posix()
            parts.append(f"![{FIGURE_TITLES[section.figure.stem]}]({link})")
    return "\n\n".join(part for part in parts if part)


def _wrapped(text: str) -> str:
    """Text with its long lines broken, for pages that are read as text too."""
    return "\n".join(
        textwrap.fill(line, _PAGE_COLUMNS, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
    )


def to_html(title: str, sections: Sequence[Section]) -> str:
    """Sections as one HTML file that includes its figures."""
    jinja2 = require_package("jinja2", "bench", "an HTML report")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)

    def encode(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    html: str = template.render(title=title, sections=sections, titles=FIGURE_TITLES, encode=encode)
    return html


def print_table(table: Table) -> None:
    """Print a table on the terminal."""
    from rich.console import Console
    from rich.table import Table as RichTable

    rich_table = RichTable(*table.columns)
    for row in table.rows:
        rich_table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # output to a file is not wrapped
    console.print(rich_table)


def write_report(folder: Path) -> list[Path]:
    """Draw the figures of a result folder and write its report; returns the files, the report last."""
    if (folder / SUMMARY).is_file() or (folder / RUN).is_file():
        summary = read_summary(folder)
        name = summary["settings"].get("preset") or folder.name
        figures = draw_run_figures(FigureData.read(folder, summary), folder / FIGURES)
        question = PRESETS[name].question if name in PRESETS else ""
        sections = [*kinds_sections(summary), *run_sections(folder, summary, question)]
    elif records := engine_records(folder):
        name = "engine"
        figures = draw_engine_figures(records, folder / FIGURES)
        sections = engine_folder_sections(folder)
    else:
        raise ConfigError(f"{folder} holds no benchmark; name a folder written by `underdraw bench --out`.")
    atomic_write_text(folder / REPORT, to_html(name, sections))
    return [*figures, folder / REPORT]


def find_pages(path: Path) -> list[Path]:
    """A Markdown page, or all pages below a folder, that have generated blocks."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a Markdown page, or a folder of pages.")
    pages = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    pages = [page for page in pages if BLOCK.search(read_text(page, "a page"))]
    if not pages:
        raise ConfigError(f"{path} has no block between <!-- results: PATH --> and <!-- end -->; add one.")
    return pages


def update_page(page: Path) -> bool:
    """Generate the blocks of a page again; returns whether it changed."""
    before = read_text(page, "a page")
    after = BLOCK.sub(lambda match: f"{match[1]}\n{_block(page.parent, match[2])}\n\n{match[3]}", before)
    if after != before:
        atomic_write_text(page, after)
    return after != before


def _block(base: Path, name: str) -> str:
    """The Markdown of the results at a path relative to the page."""
    name, _, part = name.partition("#")
    path = base / name
    if part == "kinds" and (path / SUMMARY).is_file():
        return to_markdown(kinds_sections(read_json(path / SUMMARY, "the summary of a benchmark"), only_speed=True))
    if part == "aims" and path.is_dir():
        return to_markdown(aims_sections(engine_records(path)))
    if path.suffix == ".json" and path.is_file():
        return to_markdown(record_sections(read_record(path)))
    if (path / SUMMARY).is_file():
        summary = read_json(path / SUMMARY, "the summary of a benchmark")
        return to_markdown([*kinds_sections(summary), *run_sections(path, summary)], base)
    if path.is_dir() and engine_records(path):
        return to_markdown(engine_folder_sections(path), base)
    if any(path.glob(f"*/*/{SUMMARY}")):
        return to_markdown(index_sections(path), base)
    return f"No results in `{path.name}` yet; the command above creates them."
