"""A run as one HTML file: what was measured on what, the tables, and the figures inside the file itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from underdraw.bench.figures import TITLES, Run, draw_all
from underdraw.bench.presets import PRESETS
from underdraw.bench.results import picture_name, read_json
from underdraw.bench.summary import MAPS, read_summary
from underdraw.bench.tables import COSTS, HEAD, LEGEND, as_html, cost_lines, lines, same_depth
from underdraw.io import atomic_write

FIGURES, REPORT = "figures", "report.html"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 } th, td { padding: .2rem .6rem; text-align: right }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
tr:nth-child(even) { background: #f4f4f4 } img { max-width: 100% } .small { color: #555; font-size: 13px }
"""


def write_report(folder: Path) -> list[Path]:
    """Draw the figures of the run in `folder` and write its report; returns the files."""
    summary = read_summary(folder)
    maps = read_json(folder / MAPS) if (folder / MAPS).is_file() else []
    temperatures = {one["temperature"] for one in summary["entries"]}
    pictures = {t: folder / picture_name(t) for t in temperatures if (folder / picture_name(t)).is_file()}
    figures = draw_all(Run(summary, maps, pictures), folder / FIGURES)
    with atomic_write(folder / REPORT) as file:
        file.write(page(folder.name, summary, figures).encode())
    return [*figures, folder / REPORT]


def page(title: str, summary: dict[str, Any], figures: Sequence[Path]) -> str:
    """The report as HTML."""
    name = summary["settings"].get("preset") or title
    question = PRESETS[name].question if name in PRESETS else ""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>underdraw bench: {html.escape(name)}</title>",
        f"<style>{STYLE}</style><h1>{html.escape(name)}</h1>",
        f"<p>{html.escape(question)}</p>",
        as_html(HEAD, lines(summary)),
        f"<p class='small'>{html.escape(LEGEND)}</p>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in same_depth(summary)),
    ]
    for figure in figures:
        data = base64.b64encode(figure.read_bytes()).decode()
        told = html.escape(TITLES[figure.stem])
        parts.append(f"<h2>{told}</h2><img alt='{told}' src='data:image/png;base64,{data}'>")
    parts += ["<h2>Does the time follow from the trees?</h2>", as_html(COSTS, cost_lines(summary))]
    columns = ("name", "tree", "verifier", "drafter", "proposal", "about")
    methods = [[method[column] for column in columns] for method in summary["methods"].values()]
    parts += ["<h2>Methods</h2>", as_html(columns, methods)]
    facts = {**summary["settings"], **(summary.get("machine") or {})}
    parts += ["<h2>Settings and machine</h2>", as_html(("what", "value"), [[k, str(v)] for k, v in facts.items()])]
    return "\n".join([*parts, "</html>\n"])
