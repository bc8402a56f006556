"""Results as sections (text, table, figure), the common form of terminal output, HTML reports and Markdown pages.

A result is the folder of a benchmark, a JSON file with a `kind`, or a folder of such files. No torch, no pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from underdraw.bench.presets import PLAIN, PRESETS
from underdraw.bench.summary import SUMMARY, drafter_label
from underdraw.io import read_json

Record = Mapping[str, Any]
Cell = str | Callable[[Any], str]  # a format of an entry's fields, such as "{tau:.2f}", or a function of the entry
FIGURES = "figures"  # folder of a result's figures


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, entries: Iterable[Record], columns: Mapping[str, Cell]) -> Table:
        """One row per entry; `columns` has the cells by title."""
        cells = columns.values()
        return cls(
            list(columns),
            [[cell.format_map(entry) if isinstance(cell, str) else cell(entry) for cell in cells] for entry in entries],
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, text, a table with a note below it, and a figure; all optional."""

    heading: str = ""
    text: str = ""
    table: Table | None = None
    note: str = ""
    figure: Path | None = None
    only_in_report: bool = False  # left out of Markdown pages


FIGURE_TITLES = {
    "speedup": "Speed-up over plain AR",
    "accepted": "Accepted tokens per cell",
    "entropy": "Entropy and top-1 probability of the target",
    "ranks": "Rank of the accepted token",
    "lengths": "Accepted tokens per pass",
    "depth": "Tree depth per cell",
    "width": "Tree width per cell",
    "nodes": "Tokens per pass against nodes",
    "quality": "Speed-up against distance from plain AR",
    "sweep": "Sensitivity of the speed-up",
    "pass_time": "Time of a pass against its number of nodes",
}
LEGEND = (
    "speed-up: over plain AR on the same prompt in the same turn, median (10th to 90th percentile). tokens/pass: tau. "
    "depth, nodes: of the draft tree, mean per pass. drafting: the drafter's share of the time. memory: peak; on a GPU "
    "with the buffers of all methods. equal codes, identical images: compared with plain AR of the same seed. MMD (p): "
    "distance of the codes from those of plain AR, and the p-value of the hypothesis that both have the same "
    "distribution. drafter -: none; trained: the one that comes with the model."
)


def hardware_label(machine: Record | None) -> str:
    """The GPU, or the processor with its number of threads."""
    if not machine:
        return "unknown hardware"
    if machine["device"] != "cpu":
        return str(machine["device"])
    return f"{machine['processor']}, {machine['threads']} threads"


def machine_label(machine: Record | None) -> str:
    """Hardware, torch version and commit."""
    facts = machine or {}
    return f"{hardware_label(machine)}, torch {facts.get('torch')}, commit {str(facts.get('commit'))[:12]}"


def sampling_label(settings: Record) -> str:
    """Guidance, and top-p where it cuts."""
    top_p = settings.get("top_p", 1.0)
    return f"guidance {settings['guidance']:g}" + (f", top-p {top_p:g}" if top_p < 1 else "")


def describe_settings(settings: Record, machine: Record | None) -> str:
    """The drafter, dtype, guidance, top-p, hardware, torch version and commit in one sentence."""
    drafter = Path(str(settings.get("drafter"))).name
    return f"Drafter {drafter}, {settings['dtype']}, {sampling_label(settings)}, on {machine_label(machine)}."


def portable_settings(settings: Record) -> dict[str, Any]:
    """Settings for result files: of a drafter's folder only the name, since its location means nothing elsewhere."""
    drafter = str(settings["drafter"])
    return {**settings, "drafter": Path(drafter).name if Path(drafter).is_absolute() else drafter}


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


# ---------------------------------------------------------------------------------------------- runs of `bench`


def run_sections(folder: Path, summary: Record, question: str = "") -> list[Section]:
    """A benchmark: facts, main table, comparison at equal depth, figures, cost model, methods, settings."""
    settings, machine = summary["settings"], summary.get("machine")
    facts = f"Model {settings['model']}. {describe_settings(settings, machine)}" if machine else ""
    sections = [Section(text=question, only_in_report=True)] if question else []
    sections.append(Section(text=facts, table=main_table(summary), note=LEGEND))
    comparison = compare_at_equal_depth(summary)
    if comparison:
        sections.append(Section(text=" ".join(comparison)))
    sections += figure_sections(folder)
    if summary["cost_model"]:
        sections.append(Section("Cost model", "Predicted over measured time:", cost_table(summary)))
    columns = {name: f"{{{name}}}" for name in ("name", "tree", "verifier", "drafter", "proposal", "about")}
    methods = Table.of(summary["methods"].values(), columns)
    sections.append(Section("Methods", table=methods, only_in_report=True))
    values = [[key, str(value)] for key, value in {**settings, **(machine or {})}.items()]
    sections.append(Section("Settings and machine", table=Table(("setting", "value"), values), only_in_report=True))
    return sections


def figure_sections(folder: Path) -> list[Section]:
    """One section for each figure that exists, in a fixed order."""
    paths = {stem: folder / FIGURES / f"{stem}.png" for stem in FIGURE_TITLES}
    return [Section(figure=path) for path in paths.values() if path.is_file()]


def main_table(summary: Record) -> Table:
    """One row per method and temperature."""
    columns: dict[str, Cell] = {
        "method": "{method}",
        "drafter": lambda entry: drafter_label(summary, entry["method"]),
        "T": "{temperature:g}",
        "prompts": "{prompts}",
        "speed-up": speedup_label,
        "tokens/pass": "{tau:.2f}",
        "depth": "{depth:.2f}",
        "nodes": "{nodes:.1f}",
        "drafting": lambda entry: "-" if entry["method"] == PLAIN else percent(entry["draft_share"]),
        "s/image": "{seconds[median]:.3g}",
        "memory": lambda entry: f"{entry['memory'] / 1e9:.2f} GB",
        "equal codes": lambda entry: percent(entry["equal_codes"], 1),
        "identical images": "{equal_images}",
        "MMD (p)": lambda entry: "{mmd:.4f} ({p:.3g})".format_map(test) if (test := entry["against_plain"]) else "-",
    }
    return Table.of(summary["entries"], columns)


def speedup_label(entry: Record) -> str:
    speedup = entry["speedup"]
    return "-" if speedup is None else f"{speedup['median']:.2f} ({speedup['p10']:.2f}-{speedup['p90']:.2f})"


def cost_table(summary: Record) -> Table:
    """Predictions of the cost model over measured times."""

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    columns: dict[str, Cell] = {
        "method": "{method}",
        "drafter": lambda check: drafter_label(summary, check["method"]),
        "T": "{temperature:g}",
        "measured s": "{measured:.3g}",
        "by costs measured apart": lambda check: ratio(check["by_costs"]),
        "by costs fitted to other prompts": lambda check: ratio(check["by_fit"]),
    }
    return Table.of(summary["cost_model"], columns)


def compare_at_equal_depth(summary: Record) -> list[str]:
    """Sentences that compare ADT-Tree with fixed-size trees, interpolated to the same mean depth.

    For runs with methods called "FAMILY, depth D".
    """
    sentences = []
    for entry in summary["entries"]:
        for family in ("EAGLE-2", "static", "shared noise"):
            points = sorted(
                (other["depth"], other["tau"], other["speedup"]["median"])
                for other in summary["entries"]
                if other["method"].startswith(f"{family}, depth") and other["temperature"] == entry["temperature"]
            )
            if entry["method"].startswith("ADT-Tree") and points and points[0][0] <= entry["depth"] <= points[-1][0]:
                depths, taus, speedups = zip(*points, strict=True)
                tau, speedup = np.interp(entry["depth"], depths, taus), np.interp(entry["depth"], depths, speedups)
                sentences.append(
                    f"T={entry['temperature']:g}, mean depth {entry['depth']:.2f}: {entry['method']} "
                    f"{entry['tau']:.2f} tokens/pass, speed-up {entry['speedup']['median']:.2f}; {family} of that "
                    f"depth {tau:.2f} tokens/pass, speed-up {speedup:.2f}."
                )
    return sentences


def index_sections(results: Path) -> list[Section]:
    """The fastest exact method of every run below a folder at its highest temperature."""
    columns: dict[str, Cell] = {
        "experiment": "[{preset}](experiments/{preset}.md)",
        "hardware": "{hardware}",
        "dtype": "{dtype}",
        "prompts": "{prompts}",
        "T": "{temperature:g}",
        "fastest exact method": "{method}",
        "drafter": "{drafter}",
        "speed-up": speedup_label,
        "tokens/pass": "{tau:.2f}",
        "identical images": "{equal_images}",
    }
    rows = []
    order = {name: index for index, name in enumerate(PRESETS)}
    paths = results.glob(f"*/*/{SUMMARY}")
    for path in sorted(paths, key=lambda path: (order.get(path.parent.parent.name, len(order)), path)):
        summary = read_json(path, "the summary of a benchmark")
        entries = [entry for entry in summary["entries"] if entry["method"] != PLAIN and entry["speedup"]]
        entries = [entry for entry in entries if summary["methods"][entry["method"]]["verifier"] == "exact"]
        best = max(entries, key=lambda entry: (entry["temperature"], entry["speedup"]["median"]))
        facts = {"preset": path.parent.parent.name, "dtype": summary["settings"]["dtype"]}
        facts |= {"hardware": hardware_label(summary["machine"]), "drafter": drafter_label(summary, best["method"])}
        rows.append({**best, **facts})
    return [Section(table=Table.of(rows, columns))]
