"""The figures of a run, as PNG and SVG files, from its summary, maps and first pictures. Matplotlib is imported late.

A figure that a run holds nothing for is left out: maps need cells, the heat map a sweep, the last one LANTERN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from underdraw.bench.methods import PLAIN
from underdraw.extras import require_package
from underdraw.io import atomic_write

SHOWN = 6  # methods on one sheet of maps
PANEL = 2.5  # inches a map
KINDS = ("png", "svg")


@dataclass(frozen=True, slots=True)
class Run:
    """What figures are drawn from."""

    summary: dict[str, Any]
    maps: list[dict[str, Any]]
    pictures: Mapping[float, Path] = field(default_factory=dict)  # the first one of plain AR at each temperature

    @property
    def hottest(self) -> float:
        """The temperature that maps are shown at: the highest."""
        return max(one["temperature"] for one in self.summary["entries"])

    def entries(self, temperature: float | None = None) -> list[dict[str, Any]]:
        found = [one for one in self.summary["entries"] if one["method"] != PLAIN]
        return [one for one in found if temperature in (None, one["temperature"])]

    def drafted(self) -> list[dict[str, Any]]:
        """Maps of the methods that draft, at the highest temperature."""
        return [one for one in self.maps if one["method"] != PLAIN and one["temperature"] == self.hottest]


def draw_all(run: Run, folder: Path) -> list[Path]:
    """Write every figure that the run holds something for; returns the PNG files."""
    pyplot = require_package("matplotlib.pyplot", "bench", "drawing figures")
    pyplot.switch_backend("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, draw in FIGURES.items():
        with pyplot.rc_context({"figure.constrained_layout.use": True}):
            figure = draw(pyplot, run)
        if figure is None:
            continue
        for kind in KINDS:
            # Without date and random ids the same run gives the same bytes.
            about = {"Date": None} if kind == "svg" else {"Software": None}
            with atomic_write(folder / f"{name}.{kind}") as file, pyplot.rc_context({"svg.hashsalt": name}):
                figure.savefig(file, format=kind, dpi=110, metadata=about)
        pyplot.close(figure)
        made.append(folder / f"{name}.png")
    return made


def speed(pyplot: Any, run: Run) -> Any:
    """Speed-up of every method, with p10 to p90."""
    temperatures = sorted({one["temperature"] for one in run.entries()})
    if not temperatures:
        return None
    names = list(dict.fromkeys(one["method"] for one in run.entries()))
    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.28 * len(names) * len(temperatures)))
    for shift, temperature in enumerate(temperatures):
        own = {one["method"]: one["speedup"] for one in run.entries(temperature)}
        places = [y + (shift - (len(temperatures) - 1) / 2) * 0.8 / len(temperatures) for y in range(len(names))]
        known = [(y, own[name]) for y, name in zip(places, names, strict=True) if own.get(name)]
        middle = [value["median"] for _, value in known]
        low = [value["median"] - value["p10"] for _, value in known]
        high = [value["p90"] - value["median"] for _, value in known]
        axes.barh(
            [y for y, _ in known], middle, 0.8 / len(temperatures), xerr=(low, high), label=f"T = {temperature:g}",
            error_kw={"elinewidth": 0.8},
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up over plain AR, median and p10 to p90")
    axes.legend()
    return figure


def accepted(pyplot: Any, run: Run) -> Any:
    """Accepted length per cell: the mean over pictures above, one picture below."""
    return _map_sheet(pyplot, run, "accepted", "drafted codes kept in a cell's pass")


def depth(pyplot: Any, run: Run) -> Any:
    return _map_sheet(pyplot, run, "depth", "depth of the tree of a cell's pass")


def width(pyplot: Any, run: Run) -> Any:
    return _map_sheet(pyplot, run, "width", "width of the tree of a cell's pass")


def _map_sheet(pyplot: Any, run: Run, column: str, title: str) -> Any:
    """Two rows of maps on one scale: means over pictures, and the first picture, over plain AR's own."""
    found = run.drafted()
    # Every method has a column; past a few they are too small to read, so the first and the last ones are shown.
    shown = list(found) if len(found) <= SHOWN else [*found[: SHOWN // 2], *found[-SHOWN // 2 :]]
    if not shown:
        return None
    high = max(float(np.max(one["first"][column])) for one in shown)
    size = (PANEL * len(shown) + 1, 2 * PANEL + 0.8)
    figure, axes = pyplot.subplots(2, len(shown), figsize=size, squeeze=False)
    image = None
    for place, one in enumerate(shown):
        for row, (kind, label) in enumerate((("mean", "mean over pictures"), ("first", "first picture"))):
            values = np.array(one[kind][column])
            under = run.pictures.get(run.hottest) if kind == "first" else None
            if under is not None:
                frame = (-0.5, values.shape[1] - 0.5, values.shape[0] - 0.5, -0.5)
                axes[row][place].imshow(pyplot.imread(under)[..., :3].mean(-1), cmap="gray", extent=frame)
            shade = 1.0 if under is None else 0.7
            image = axes[row][place].imshow(values, vmin=0, vmax=max(high, 1), cmap="viridis", alpha=shade)
            axes[row][place].set(xticks=[], yticks=[], ylabel=label if place == 0 else "")
        axes[0][place].set_title(f"{one['method']}\nT = {one['temperature']:g}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.7)
    return figure


def token_stats(pyplot: Any, run: Run) -> Any:
    """Top-1 probability and entropy of the target's law over the picture."""
    found = [one for one in run.maps if one["method"] == PLAIN and "entropy" in one["mean"]]
    if not found:
        return None
    figure, axes = pyplot.subplots(len(found), 4, figsize=(4 * PANEL + 1, PANEL * len(found) + 0.6), squeeze=False)
    for row, one in enumerate(found):
        panels = [(kind, column) for column in ("top1", "entropy") for kind in ("mean", "first")]
        for place, (kind, column) in enumerate(panels):
            values = np.array(one[kind][column])
            high = 1.0 if column == "top1" else max(float(np.nanmax(values)), 1e-3)
            image = axes[row][place].imshow(values, vmin=0, vmax=high, cmap="viridis")
            what = "top-1 probability" if column == "top1" else "entropy (nats)"
            axes[row][place].set_title(f"{what}, T = {one['temperature']:g}\n{kind}", fontsize=8)
            axes[row][place].set(xticks=[], yticks=[])
            figure.colorbar(image, ax=axes[row][place], shrink=0.7)
    return figure


def ranks(pyplot: Any, run: Run) -> Any:
    """Place of the accepted token in the draft's ranking."""
    found = [one for one in run.drafted() if one["ranks"]]
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for one in found:
        share = np.array(one["ranks"]) / sum(one["ranks"])
        axes.plot(np.arange(1, len(share) + 1), share, marker="o", markersize=3, label=one["method"])
    axes.set(xlabel="rank among its siblings", ylabel="share of accepted tokens", yscale="log")
    axes.set_title(f"which child is accepted, T = {run.hottest:g}", fontsize=10)
    axes.legend(fontsize=7)
    return figure


def lengths(pyplot: Any, run: Run) -> Any:
    """Distribution of accepted lengths."""
    found = run.drafted()
    if not found:
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for one in found:
        share = np.array(one["lengths"]) / sum(one["lengths"])
        axes.plot(np.arange(len(share)), share, marker="o", markersize=3, label=one["method"])
    axes.set(xlabel="drafted tokens that a pass accepts", ylabel="share of passes")
    axes.set_title(f"accepted lengths, T = {run.hottest:g}", fontsize=10)
    axes.legend(fontsize=7)
    return figure


def nodes(pyplot: Any, run: Run) -> Any:
    """tau against nodes checked a pass."""
    if not run.entries():
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for temperature in sorted({one["temperature"] for one in run.entries()}):
        own = run.entries(temperature)
        x, y = [one["nodes"] for one in own], [one["tau"] for one in own]
        axes.scatter(x, y, s=18, label=f"T = {temperature:g}")
        for one in own if len(own) <= 12 else []:
            axes.annotate(
                one["method"], (one["nodes"], one["tau"]), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
    axes.set(xlabel="nodes checked a pass", ylabel="tau, tokens a pass")
    axes.legend()
    return figure


def quality(pyplot: Any, run: Run) -> Any:
    """Speed against distance from plain autoregression's law, for relaxed and exact methods."""
    found = [one for one in run.entries(run.hottest) if one["against_plain"] is not None and one["speedup"]]
    if not any("LANTERN" in one["method"] for one in found):
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for one in found:
        x, y = one["against_plain"]["mmd"], one["speedup"]["median"]
        seen = one["against_plain"]["p"] < 0.01
        axes.scatter([x], [y], s=30, color="tab:red" if seen else "tab:green", marker="x" if seen else "o")
        axes.annotate(one["method"], (x, y), fontsize=6, xytext=(4, 3), textcoords="offset points")
    axes.set(xlabel="distance of the codes from plain AR's (MMD)", ylabel="speed-up over plain AR")
    axes.set_title(f"speed against quality, T = {run.hottest:g} (cross: another law, p < 0.01)", fontsize=10)
    return figure


def sweep(pyplot: Any, run: Run) -> Any:
    """Heat map of speed-up over beta and l_d, and the sweeps of one option at a time beside it."""
    own = {one["method"]: one["speedup"] for one in run.entries(run.hottest) if one["speedup"]}
    pairs = {tuple(name.split(", ")): value["median"] for name, value in own.items() if name.startswith("beta=")}
    if not pairs:
        return None
    betas, steps = (list(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1))
    table = np.array([[pairs.get((beta, step), np.nan) for step in steps] for beta in betas])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5))
    image = left.imshow(table, cmap="viridis", aspect="auto")
    left.set_xticks(range(len(steps)), steps)
    left.set_yticks(range(len(betas)), betas)
    for row, values in enumerate(table):
        for place, value in enumerate(values):
            left.text(place, row, f"{value:.2f}", ha="center", va="center", color="white", fontsize=8)
    left.set_title(f"speed-up, T = {run.hottest:g}", fontsize=10)
    figure.colorbar(image, ax=left)
    single = {name: value for name, value in own.items() if "," not in name}
    middle = [value["median"] for value in single.values()]
    spread = [[v["median"] - v["p10"] for v in single.values()], [v["p90"] - v["median"] for v in single.values()]]
    right.errorbar(middle, range(len(single)), xerr=spread, fmt="o", markersize=3, linewidth=0.8)
    right.set_yticks(range(len(single)), list(single), fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("speed-up, one option changed at a time")
    return figure


FIGURES: dict[str, Callable[[Any, Run], Any]] = {
    "speedup": speed, "accepted": accepted, "laws": token_stats, "ranks": ranks, "lengths": lengths, "depth": depth,
    "width": width, "nodes": nodes, "quality": quality, "sweep": sweep,
}  # fmt: skip
TITLES = {
    "speedup": "Speed-up over plain AR", "accepted": "Accepted length per cell",
    "laws": "Top-1 probability and entropy", "ranks": "Rank of the accepted token", "lengths": "Accepted lengths",
    "depth": "Depth per cell", "width": "Width per cell", "nodes": "Tokens a pass against nodes",
    "quality": "Speed against quality", "sweep": "Sensitivity",
}  # fmt: skip
