"""Results as sections (text, table, figure), the common form of terminal output, HTML reports and Markdown pages.

A result is the folder of a benchmark, a JSON file with a `kind`, or a folder of such files. No torch, no pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from underdraw.bench.presets import PLAIN, PRESETS
from underdraw.bench.summary import SUMMARY, drafter_label
from underdraw.io import read_json

Record = Mapping[str, Any]
FIGURES = "figures"  # folder of a result's figures


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


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


def describe_settings(settings: Record, machine: Record | None) -> str:
    """The drafter, dtype, guidance, hardware, torch version and commit in one sentence."""
    facts = machine or {}
    drafter = Path(str(settings.get("drafter"))).name
    return (
        f"Drafter {drafter}, {settings['dtype']}, guidance {settings['guidance']:g}, on "
        f"{hardware_label(machine)}, torch {facts.get('torch')}, commit {str(facts.get('commit'))[:12]}."
    )


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
    columns = ("name", "tree", "verifier", "drafter", "proposal", "about")
    methods = [[method[column] for column in columns] for method in summary["methods"].values()]
    sections.append(Section("Methods", table=Table(columns, methods), only_in_report=True))
    values = [[key, str(value)] for key, value in {**settings, **(machine or {})}.items()]
    sections.append(Section("Settings and machine", table=Table(("setting", "value"), values), only_in_report=True))
    return sections


def figure_sections(folder: Path) -> list[Section]:
    """One section for each figure that exists, in a fixed order."""
    paths = {stem: folder / FIGURES / f"{stem}.png" for stem in FIGURE_TITLES}
    return [Section(figure=path) for path in paths.values() if path.is_file()]


def main_table(summary: Record) -> Table:
    """One row per method and temperature."""
    columns = (
        "method", "drafter", "T", "prompts", "speed-up", "tokens/pass", "depth", "nodes", "drafting", "s/image",
        "memory", "equal codes", "identical images", "MMD (p)",
    )  # fmt: skip
    return Table(columns, [_main_row(summary, entry) for entry in summary["entries"]])


def _main_row(summary: Record, entry: Record) -> list[str]:
    test = entry["against_plain"]
    return [
        entry["method"],
        drafter_label(summary, entry["method"]),
        f"{entry['temperature']:g}",
        str(entry["prompts"]),
        speedup_label(entry),
        f"{entry['tau']:.2f}",
        f"{entry['depth']:.2f}",
        f"{entry['nodes']:.1f}",
        "-" if entry["method"] == PLAIN else percent(entry["draft_share"]),
        f"{entry['seconds']['median']:.3g}",
        f"{entry['memory'] / 1e9:.2f} GB",
        percent(entry["equal_codes"], 1),
        entry["equal_images"],
        "-" if test is None else f"{test['mmd']:.4f} ({test['p']:.3g})",
    ]


def speedup_label(entry: Record) -> str:
    speedup = entry["speedup"]
    return "-" if speedup is None else f"{speedup['median']:.2f} ({speedup['p10']:.2f}-{speedup['p90']:.2f})"


def cost_table(summary: Record) -> Table:
    """Predictions of the cost model over measured times."""

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    columns = ("method", "drafter", "T", "measured s", "by costs measured apart", "by costs fitted to other prompts")
    rows = [
        [
            check["method"],
            drafter_label(summary, check["method"]),
            f"{check['temperature']:g}",
            f"{check['measured']:.3g}",
            ratio(check["by_costs"]),
            ratio(check["by_fit"]),
        ]
        for check in summary["cost_model"]
    ]
    return Table(columns, rows)


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
    columns = (
        "experiment", "hardware", "dtype", "prompts", "T", "fastest exact method", "drafter", "speed-up", "tokens/pass",
        "identical images",
    )  # fmt: skip
    rows = []
    order = {name: index for index, name in enumerate(PRESETS)}
    paths = results.glob(f"*/*/{SUMMARY}")
    for path in sorted(paths, key=lambda path: (order.get(path.parent.parent.name, len(order)), path)):
        summary = read_json(path, "the summary of a benchmark")
        entries = [entry for entry in summary["entries"] if entry["method"] != PLAIN and entry["speedup"]]
        entries = [entry for entry in entries if summary["methods"][entry["method"]]["verifier"] == "exact"]
        temperature = max(entry["temperature"] for entry in entries)
        entries = [entry for entry in entries if entry["temperature"] == temperature]
        best = max(entries, key=lambda entry: float(entry["speedup"]["median"]))
        preset = path.parent.parent.name
        rows.append(
            [
                f"[{preset}](experiments/{preset}.md)",
                hardware_label(summary["machine"]),
                summary["settings"]["dtype"],
                str(best["prompts"]),
                f"{temperature:g}",
                best["method"],
                drafter_label(summary, best["method"]),
                speedup_label(best),
                f"{best['tau']:.2f}",
                best["equal_images"],
            ]
        )
    return [Section(table=Table(columns, rows))]
