"""The table of a run over kinds of pictures: one row per method, one column per kind. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from underdraw.bench.presets import PLAIN
from underdraw.bench.sections import Record, Section, Table, machine_label, percent, sampling_label

LABELS = {
    "plain": "plain background",
    "gradient": "gradient",
    "scene": "sprite in a landscape",
    "portrait": "portrait",
    "photo": "photo",
}
NOTE = (
    "Each cell: tokens per pass, then the speed-up over plain decoding of the same picture in the same turn: median "
    "(p10 to p90). identical: pictures whose codes are all those of plain decoding."
)


SPEED_NOTE = (
    "Each cell: times as fast as plain decoding (AR) of the same picture in the same turn: median (p10 to p90), "
    "without brackets of one picture. identical: pictures whose codes are all those of plain decoding."
)


def kinds_sections(summary: Record, *, only_speed: bool = False) -> list[Section]:
    """One table per temperature, the highest first; nothing for runs without kinds.

    With `only_speed`, tokens per pass are shown over all pictures alone.
    """
    entries = [entry for entry in summary["entries"] if entry.get("kinds")]
    settings, machine = summary["settings"], summary.get("machine")
    sections = []
    for temperature in sorted({entry["temperature"] for entry in entries}, reverse=True):
        shown = [entry for entry in entries if entry["temperature"] == temperature]
        pictures = shown[0]["kinds"]["all"]["pictures"]
        text = f"Model {settings['model']}, temperature {temperature:g}, {pictures} pictures"
        if machine:
            text += f"; {settings['dtype']}, {sampling_label(settings)}, {machine_label(machine)}"
        table, note = (_speed_table(shown), SPEED_NOTE) if only_speed else (_table(shown), NOTE)
        sections.append(Section(text=f"{text}.", table=table, note=note))
    return sections


def _table(entries: list[Mapping[str, Any]]) -> Table:
    kinds = list(entries[0]["kinds"])
    columns = ("method", *(LABELS.get(kind, kind) for kind in kinds), "identical")
    rows = []
    for entry in entries:
        total = entry["kinds"]["all"]
        cells = [_cell(entry["kinds"].get(kind), is_plain=entry["method"] == PLAIN) for kind in kinds]
        rows.append([entry["method"], *cells, f"{total['identical']} of {total['pictures']}"])
    return Table(columns, rows)


def _speed_table(entries: list[Mapping[str, Any]]) -> Table:
    kinds = list(entries[0]["kinds"])
    columns = ("method", *(LABELS.get(kind, kind) for kind in kinds), "tokens per pass", "identical")
    rows = []
    for entry in entries:
        if entry["method"] == PLAIN:
            continue
        total = entry["kinds"]["all"]
        cells = [_speed_cell(entry["kinds"].get(kind)) for kind in kinds]
        rows.append([entry["method"], *cells, f"{total['tau']:.2f}", f"{total['identical']} of {total['pictures']}"])
    return Table(columns, rows)


def _speed_cell(values: Mapping[str, Any] | None) -> str:
    if values is None or values["speedup"] is None:
        return "-"
    speedup = values["speedup"]
    spread = f" ({speedup['p10']:.2f} to {speedup['p90']:.2f})" if values["pictures"] > 1 else ""
    return f"**{speedup['median']:.2f}**{spread}"


def _cell(values: Mapping[str, Any] | None, *, is_plain: bool) -> str:
    if values is None:  # a stopped run has drawn pictures of fewer kinds with some methods
        return "-"
    speedup = values["speedup"]
    if is_plain or speedup is None:
        return f"{values['tau']:.2f}"
    return f"{values['tau']:.2f}, **{speedup['median']:.2f}x** ({speedup['p10']:.2f} to {speedup['p90']:.2f})"


def sweep_sections(record: Record) -> list[Section]:
    """Tokens per pass by draft and kind; in brackets the gain over the first draft at the same temperature."""
    rows = record["rows"]
    first: dict[float, Record] = {}
    facts = ("temperature", "setting", "all", "nodes", "trunk", "same", "images")
    kinds = [name for name in rows[0] if name not in facts]
    table = []
    for row in rows:
        base = first.setdefault(row["temperature"], row)
        cells = [f"{row['temperature']:g}", f"`{row['setting']}`"]
        for kind in ("all", *kinds):
            gain = f" ({100 * (row[kind] / base[kind] - 1):+.0f} %)" if row is not base else ""
            cells.append(f"{row[kind]:.2f}{gain}")
        table.append([*cells, f"{row['trunk']:.1f}", f"{row['same']} of {row['images']}"])
    columns = ("T", "drafter and tree", "all", *(LABELS.get(kind, kind) for kind in kinds), "mean trunk", "identical")
    text = f"Model {record['model']}, {record['dtype']}, {record['numerics']}, {machine_label(record['machine'])}."
    note = (
        "Harmonic means of tokens per pass, that is tokens over passes. identical: pictures equal to plain decoding's."
    )
    return [Section(text=text, table=Table(columns, table), note=note)]


def neighbourhood_sections(record: Record) -> list[Section]:
    """How well the accepted lengths in each neighbourhood predict that of the next pass."""
    titles = {"above": "row above", "left": "left, 12 cells", "above-right": "above-right, half a row"}
    titles["previous"] = "previous pass"
    table = []
    for kind, values in record["kinds"].items():
        best = max(titles, key=lambda name: values[name])
        cells = [f"**{values[name]:.2f}**" if name == best else f"{values[name]:.2f}" for name in titles]
        table.append([LABELS.get(kind, kind), str(values["passes"]), *cells])
    text = (
        f"{record['method']}, temperature {record['temperature']:g}, {record['pictures']} pictures; {record['dtype']}, "
        f"{machine_label(record['machine'])}."
    )
    return [Section(text=text, table=Table(("kind", "passes", *titles.values()), table))]


def replay_sections(record: Record) -> list[Section]:
    """Replayed traces of all kinds: speed over plain decoding by setting and kind, median (p10 to p90)."""
    rows, machine = record["rows"], record["machine"]
    kinds = [*dict.fromkeys(row["kind"] for row in rows), "all"]
    table = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells = [setting]
        for kind in kinds:
            chosen = [row for row in rows if row["setting"] == setting and kind in (row["kind"], "all")]
            p10, median, p90 = np.percentile([row["over_plain"] for row in chosen], [10, 50, 90]) if chosen else [0] * 3
            cells.append(f"**{median:.2f}x** ({p10:.2f} to {p90:.2f})" if chosen else "-")
        chosen = [row for row in rows if row["setting"] == setting]
        time = sum(row["ms_per_token"] for row in chosen) / len(chosen)
        table.append([*cells, f"{record['plain_ms'] / time:.2f}x", str(len(chosen))])
    columns = ("draft", *(LABELS.get(kind, kind) for kind in kinds), "all, by total time", "pictures")
    text = (
        f"{record['model']}, {record['dtype']}, {machine['device']}, torch {machine['torch']}, commit "
        f"{str(machine['commit'])[:12]}; plain decoding {record['plain_ms']:.2f} ms per token."
    )
    replayed = Section("Replay at another size", text, Table(columns, table), f"Replayed: {record['note']}.")
    return [replayed, *_by_cost_sections(record.get("by_costs")), *_cost_sections(record.get("costs"))]


def _by_cost_sections(by_costs: Mapping[str, Mapping[str, float]] | None) -> list[Section]:
    """Speed of all recorded settings by kind, and what `auto` loses or gains against the best fixed one."""
    if not by_costs:
        return []
    kinds = [*(kind for kind in next(iter(by_costs.values())) if kind != "all"), "all"]
    fixed = {kind: max(speed[kind] for name, speed in by_costs.items() if name != "auto") for kind in kinds}
    rows = []
    for name, speed in by_costs.items():
        marks = {kind: f" ({100 * (speed[kind] / fixed[kind] - 1):+.1f} %)" if name == "auto" else "" for kind in kinds}
        rows.append([name, *(f"{speed[kind]:.2f}x{marks[kind]}" for kind in kinds)])
    note = (
        "Total time of all recorded pictures by the cost of each pass (table below), relative to plain decoding. "
        "In brackets: auto against the fastest fixed setting of the same kind."
    )
    columns = ("draft", *(LABELS.get(kind, kind) for kind in kinds))
    return [Section("Against the best fixed size", "", Table(columns, rows), note)]


def _cost_sections(costs: Record | None) -> list[Section]:
    """What passes of every size cost, and what drafting a Jacobi chain or tree adds to them."""
    if not costs:
        return []
    forced, chain, tree = (dict(costs[name]) for name in ("forced", "chain", "tree"))
    plain, rows = forced[1], []
    for size, ms in forced.items():
        cells = [str(size), f"{ms:.2f} ms"]
        for drafted in (chain, tree):
            added = drafted.get(size, ms) - ms
            cells.append(f"{drafted[size]:.2f} ms ({percent(added / plain, 1)})" if size in drafted else "-")
        rows.append(cells)
    note = (
        "In brackets: what is added, in plain passes: noise and sampling at all nodes, growing the draft, and "
        "keeping its candidates. A tree's growth is its difference to the chain."
    )
    columns = ("nodes", "pass, nothing drafted", "with a Jacobi chain", "with a Jacobi tree")
    return [Section("What a Jacobi tree costs", "", Table(columns, rows), note)]
