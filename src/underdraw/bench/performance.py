"""docs/performance.md: the records of `underdraw bench engine` as tables. Nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from underdraw.extras import require_package

Record = dict[str, Any]


def rows(record: Record) -> Iterator[tuple[str, str]]:
    """What was measured, as names and values; a run that was stopped has measured less."""
    plain, verify = record.get("plain"), record.get("verify_ms", {})
    yield "copy bandwidth", f"{record['bandwidth_bytes_per_second'] / 1e12:.2f} TB/s"
    yield "weights read a pass", f"{record['bytes_a_pass'] / 1e9:.2f} GB"
    yield "floor", f"{record['floor_ms']:.2f} ms"
    for name, times in record.get("variants_ms", {}).items():
        text = times.get("error") or ", ".join(f"{spent:.2f} ms" for spent in times.values())
        yield f"pass over 1 and 64 nodes, {name}", text
    if plain is not None:
        yield "plain, a token", f"{plain['ms_per_token']:.2f} ms, {plain['over_floor']:.2f} x floor"
        yield "first picture, with compiling and capturing", f"{plain['first_picture_seconds']:.1f} s"
        if plain["host_share"] is not None:
            yield "host's share of a pass", f"{100 * plain['host_share']:.1f} %"
    for size, spent in verify.items():
        ratio = f", {spent / verify['1']:.2f} x one node" if "1" in verify else ""
        yield f"pass over {size} nodes", f"{spent:.2f} ms{ratio}"
    for kind, widths in record.get("level_ms", {}).items():
        for width, spent in widths.items():
            yield f"one level, {kind}, {width} nodes", f"{spent:.3f} ms"
    if "transformers" in record:
        other = record["transformers"]
        ratio = "" if plain is None else f", {other['ms_per_token'] / plain['ms_per_token']:.1f} x plain"
        yield f"transformers {other['version']} ({other['class']})", f"{other['ms_per_token']:.2f} ms{ratio}"
    for replay in record.get("replays", []):
        name = f"replayed, {replay['drafter']}, {replay['tokens_per_pass']:.2f} tokens a pass (forced)"
        yield name, f"{replay['ms_per_token']:.2f} ms a token, {replay['over_plain']:.2f} x as fast as plain"


def page(records: Sequence[Record]) -> str:
    """The tables of several records as Markdown."""
    parts = []
    for record in records:
        machine = record["machine"]
        parts.append(f"## {record['model']}, {record['dtype']}, batch {record['batch']}\n")
        parts.append(
            f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}, commit {machine['commit']}; "
            f"guidance {record['guidance']}, temperature {record['temperature']}, top-k {record['top_k']}, "
            f"{record['tokens']} tokens, compiled: {record['compiled']}, attention: {record['attention']}.\n"
        )
        parts.append("| what | value |\n|---|---|")
        parts.extend(f"| {name} | {value} |" for name, value in rows(record))
        for size, kernels in record.get("profiles", {}).items():
            if kernels:
                parts.append(f"\n| kernel of a pass over {size} nodes | times | ms |\n|---|---|---|")
                parts.extend(f"| `{one['kernel']}` | {one['count']:.0f} | {one['ms']:.3f} |" for one in kernels)
        notes = dict.fromkeys(replay["note"] for replay in record.get("replays", []))
        parts.extend(f"\nReplayed: {note}." for note in notes)
        parts.append("")
    return "\n".join(parts)


def agreement(record: Record) -> str:
    """How far plain and tree passes agree, as Markdown."""
    machine = record["machine"]
    lines = [
        f"## Agreement: {record['model']}, {record['dtype']}, {record['pictures']} pictures\n",
        f"{machine['device']}, torch {machine['torch']}, commit {machine['commit']}; guidance {record['guidance']}, "
        f"temperature {record['temperature']}, trees of {record['nodes']} nodes.\n",
        "| plain passes have | choices equal, context forced | pictures equal, end to end |\n|---|---|---|",
    ]
    for name, shares in record["shapes"].items():
        lines.append(f"| {name} | {100 * shares['tokens_equal']:.2f} % | {100 * shares['pictures_equal']:.0f} % |")
    return "\n".join(lines) + "\n"


def figure(records: Sequence[Record], path: Path) -> None:
    """Time of a pass against its nodes, and the floors, as a picture."""
    pyplot = require_package("matplotlib.pyplot", "bench", "figures")
    sheet, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for index, record in enumerate(one for one in records if one.get("verify_ms")):
        sizes, spent = [int(size) for size in record["verify_ms"]], list(record["verify_ms"].values())
        axes.plot(sizes, spent, "o-", color=f"C{index}", label=record["model"].removeprefix("random:"))
        axes.axhline(record["floor_ms"], linestyle=":", color=f"C{index}")
    axes.set(xscale="log", xlabel="nodes of a pass", ylabel="milliseconds", ylim=(0, None))
    axes.set_xticks(sizes := [1, 8, 16, 32, 64, 128], labels=[str(size) for size in sizes])
    if axes.lines:
        axes.legend(title="dotted: reading the weights once")
    sheet.savefig(path)
    pyplot.close(sheet)


def write_page(files: Sequence[Path], into: Path) -> None:
    """Put the tables between the two marks of a page, and the figure beside it."""
    start, stop = "<!-- figures -->", "<!-- /figures -->"
    text = into.read_text(encoding="utf-8")
    before, after = text.split(start)[0], text.split(stop)[1]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    timed, agreed = ([one for one in records if ("shapes" in one) == wanted] for wanted in (False, True))
    picture = into.with_suffix(".svg")
    figure(timed, picture)
    shown = f"![Time of a pass against its nodes]({picture.name})\n\n{page(timed)}{''.join(map(agreement, agreed))}"
    into.write_text(f"{before}{start}\n{shown}{stop}{after}", encoding="utf-8")
