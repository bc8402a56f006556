"""Summaries as tables: for the terminal, for a page of Markdown, for HTML. Knows what columns mean, and no model."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from underdraw.bench.methods import PLAIN

HEAD = (
    "method", "T", "prompts", "SR", "p10-p90", "tau", "d", "nodes", "drafting", "s / image", "memory", "equal codes",
    "equal images", "MMD (p)",
)  # fmt: skip
LEGEND = (
    "SR: speed-up over plain AR on the same prompt in the same turn, the median, and its 10th to 90th percentile. "
    "tau: tokens a pass. d: mean depth of the trees. nodes: nodes checked a pass. drafting: the drafter's share of the "
    "time. memory: the most that was held, on a GPU with the buffers of all methods. equal codes, equal images: "
    "agreement with plain AR of the same seed. "
    "MMD (p): distance of the codes from plain AR's, and the p-value of the hypothesis that they have one law."
)
COSTS = (
    "method",
    "T",
    "measured s",
    "predicted / measured (costs measured apart)",
    "predicted / measured (held-out fit)",
)


def lines(summary: dict[str, Any]) -> list[list[str]]:
    """The cells of the main table."""
    return [_line(one) for one in summary["entries"]]


def _line(one: dict[str, Any]) -> list[str]:
    speed, test, seconds = one["speedup"], one["against_plain"], one["seconds"]
    return [
        one["method"], f"{one['temperature']:g}", str(one["prompts"]),
        "-" if speed is None else f"{speed['median']:.2f}",
        "-" if speed is None else f"{speed['p10']:.2f}-{speed['p90']:.2f}",
        f"{one['tau']:.2f}", f"{one['depth']:.2f}", f"{one['nodes']:.1f}",
        "-" if one["method"] == PLAIN else f"{100 * one['draft_share']:.0f} %", f"{seconds['median']:.3g}",
        f"{one['memory'] / 1e9:.2f} GB", f"{100 * one['equal_codes']:.1f} %", one["equal_images"],
        "-" if test is None else f"{test['mmd']:.4f} ({test['p']:.3g})",
    ]  # fmt: skip


def cost_lines(summary: dict[str, Any]) -> list[list[str]]:
    """The cells of the cost model's check."""

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    return [
        [
            one["method"],
            f"{one['temperature']:g}",
            f"{one['measured']:.3g}",
            ratio(one["by_costs"]),
            ratio(one["by_fit"]),
        ]
        for one in summary["cost_model"]
    ]


def same_depth(summary: dict[str, Any]) -> list[str]:
    """Sentences about adaptive trees beside trees of one size: those brought to the same mean depth by interpolation.

    For summaries whose methods are called NAME and OTHER, depth D.
    """
    found = []
    for one in summary["entries"]:
        for family in ("EAGLE-2", "static", "shared noise"):
            fixed = sorted(
                (other["depth"], other["tau"], other["speedup"]["median"])
                for other in summary["entries"]
                if other["method"].startswith(f"{family}, depth") and other["temperature"] == one["temperature"]
            )
            if one["method"].startswith("ADT-Tree") and fixed and fixed[0][0] <= one["depth"] <= fixed[-1][0]:
                tau, speed = _between(fixed, one["depth"])
                found.append(
                    f"T={one['temperature']:g}, mean depth {one['depth']:.2f}: {one['method']} tau {one['tau']:.2f}, "
                    f"SR {one['speedup']['median']:.2f}; {family} of that depth tau {tau:.2f}, SR {speed:.2f}."
                )
    return found


def _between(points: Sequence[tuple[float, float, float]], depth: float) -> tuple[float, float]:
    """tau and speed-up at a depth between those of the points, on straight lines."""
    depths, taus, speeds = zip(*points, strict=True)
    return float(np.interp(depth, depths, taus)), float(np.interp(depth, depths, speeds))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def as_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def show(summary: dict[str, Any]) -> None:
    """Print the main table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEAD)
    for cells in lines(summary):
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has no width of its own
    console.print(table)
