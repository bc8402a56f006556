"""Tables and figures in a Markdown page, made from the results that the page names. Knows no model.

Everything between `<!-- results: NAME -->` and `<!-- end -->` is replaced; NAME is the folder of a benchmark or the
JSON file of another result, relative to the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from underdraw.bench import records
from underdraw.bench.figures import TITLES
from underdraw.bench.report import FIGURES
from underdraw.bench.results import read_json
from underdraw.bench.summary import SUMMARY
from underdraw.bench.tables import COSTS, HEAD, LEGEND, cost_lines, lines, markdown, same_depth
from underdraw.errors import ConfigError
from underdraw.io import atomic_write

BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.S)


def renew(page: Path) -> bool:
    """Make the page's blocks anew; True if that changed it."""
    if not page.is_file():
        raise ConfigError(f"{page} does not exist; give a Markdown page with markers <!-- results: NAME -->.")
    before = page.read_text(encoding="utf-8")
    if not BLOCK.search(before):
        raise ConfigError(f"{page} has no block between <!-- results: NAME --> and <!-- end -->; add one.")
    after = BLOCK.sub(lambda found: found[1] + block(page.parent, found[2]) + found[3], before)
    if after != before:
        with atomic_write(page) as file:
            file.write(after.encode())
    return after != before


def block(base: Path, name: str) -> str:
    """What a page says of the results in a folder or a file."""
    folder = base / name
    result = folder if folder.suffix == ".json" else folder / SUMMARY
    if not result.is_file():
        return f"There are no results in `{Path(name).name}` yet; the command above makes them.\n"
    if result == folder:
        return f"\n{records.block(folder)}\n\n"
    summary = read_json(folder / SUMMARY)
    parts = [_facts(summary), markdown(HEAD, lines(summary)), LEGEND]
    parts += [" ".join(same_depth(summary))] if same_depth(summary) else []
    parts += [f"![{TITLES[stem]}]({name}/{FIGURES}/{stem}.png)" for stem in TITLES if _is_there(folder, stem)]
    parts += ["Time predicted from passes, nodes, levels and expanded nodes:", markdown(COSTS, cost_lines(summary))]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _is_there(folder: Path, stem: str) -> bool:
    return (folder / FIGURES / f"{stem}.png").is_file()


def _facts(summary: dict[str, Any]) -> str:
    machine, settings = summary.get("machine") or {}, summary["settings"]
    device = machine.get("processor") if settings["device"] == "cpu" else machine.get("device")
    threads = f", {machine.get('threads')} threads" if settings["device"] == "cpu" else ""
    return (
        f"Model {settings['model']}, {settings['dtype']}, guidance {settings['guidance']:g}, on {device}{threads}, "
        f"torch {machine.get('torch')}, commit {str(machine.get('commit'))[:12]}."
    )
