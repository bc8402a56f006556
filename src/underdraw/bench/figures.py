"""The figures of a result, as PNG and SVG files, drawn from its summary, maps and first images.

A figure without data is left out: maps need cells, the sweep needs a sweep, the quality figure needs LANTERN.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from underdraw.bench.presets import PLAIN
from underdraw.bench.results import plain_image_name
from underdraw.bench.sections import Record, hardware_label
from underdraw.bench.summary import MAPS, drafter_label
from underdraw.extras import require_package
from underdraw.io import atomic_write, read_json

MAX_MAPS = 12  # methods on a sheet of maps; of more, evenly spaced ones are shown
MAX_CURVES = 10  # methods in a plot of curves
MAPS_PER_ROW = 6
PANEL = 2.0  # inches per map
LEGEND_ROWS = 18  # entries per column of a legend to the right of the axes
MARKERS = "osD^vP*X<>hp"
FORMATS = ("png", "svg")


@dataclass(frozen=True, slots=True)
class FigureData:
    """What the figures of a run are drawn from."""

    summary: Record
    maps: list[dict[str, Any]] = field(default_factory=list)
    pictures: Mapping[float, Path] = field(default_factory=dict)  # first image of plain AR at each temperature

    @classmethod
    def read(cls, folder: Path, summary: Record) -> FigureData:
        maps = read_json(folder / MAPS, "the maps of a benchmark") if (folder / MAPS).is_file() else []
        paths = {entry["temperature"]: folder / plain_image_name(entry["temperature"]) for entry in summary["entries"]}
        return cls(summary, maps, {temperature: path for temperature, path in paths.items() if path.is_file()})

    @property
    def source(self) -> str:
        """Model, drafter, dtype and hardware: the second line of every title."""
        settings, machine = self.summary["settings"], self.summary.get("machine")
        drafter = Path(str(settings.get("drafter"))).name
        return f"{settings.get('model')}, drafter {drafter}, {settings.get('dtype')}, {hardware_label(machine)}"

    @property
    def max_temperature(self) -> float:
        """The temperature that maps and curves are shown at."""
        return max(float(entry["temperature"]) for entry in self.summary["entries"])

    def label(self, method: str) -> str:
        """The method, with its drafter if that is not the one in the title."""
        drafter = drafter_label(self.summary, method).partition(":")[0]
        is_default = drafter in ("-", Path(str(self.summary["settings"].get("drafter"))).name)
        return method if is_default else f"{method} [{drafter}]"

    def temperatures(self) -> list[float]:
        return sorted({entry["temperature"] for entry in self.entries()})

    def entries(self, temperature: float | None = None) -> list[dict[str, Any]]:
        """Entries of the speculative methods."""
        entries = [entry for entry in self.summary["entries"] if entry["method"] != PLAIN and entry["speedup"]]
        return [entry for entry in entries if temperature in (None, entry["temperature"])]

    def speculative_maps(self) -> list[dict[str, Any]]:
        """Maps of the speculative methods at the highest temperature."""
        maps = [entry for entry in self.maps if entry["method"] != PLAIN]
        return [entry for entry in maps if entry["temperature"] == self.max_temperature]


def draw_run_figures(data: FigureData, folder: Path) -> list[Path]:
    """Write every figure that the run has data for; returns the PNG files."""
    return _save_all({name: partial(draw, data=data) for name, draw in RUN_FIGURES.items()}, folder)


def draw_engine_figures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write the figure of `bench engine` results; returns the PNG file."""
    return _save_all({"pass_time": partial(_pass_time, records=records)}, folder)


def _save_all(figures: Mapping[str, Callable[[Any], Any]], folder: Path) -> list[Path]:
    pyplot = require_package("matplotlib.pyplot", "bench", "drawing figures")
    pyplot.switch_backend("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in figures.items():
        with pyplot.rc_context({"figure.constrained_layout.use": True, "svg.hashsalt": name}):
            figure = draw(pyplot)
            if figure is None:
                continue
            for file_format in FORMATS:
                # Without date and random ids the same data gives the same bytes.
                metadata = {"Date": None} if file_format == "svg" else {"Software": None}
                with atomic_write(folder / f"{name}.{file_format}") as file:
                    figure.savefig(file, format=file_format, dpi=110, metadata=metadata)
            pyplot.close(figure)
        paths.append(folder / f"{name}.png")
    return paths


def _sample(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, evenly spaced, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[index] for index in np.linspace(0, len(items) - 1, count).round().astype(int)]


def _shown(shown: Sequence[Any], total: Sequence[Any]) -> str:
    """For titles: how many of the methods are shown."""
    return "" if len(shown) == len(total) else f", {len(shown)} of {len(total)} methods"


def _title(figure: Any, title: str, source: str) -> None:
    figure.suptitle(f"{title}\n{source}", fontsize=9)


def _legend_right(figure: Any) -> None:
    """A legend to the right of the axes, where it hides nothing, in as many columns as it needs."""
    handles = figure.axes[0].get_legend_handles_labels()[0]
    columns = -(-len(handles) // LEGEND_ROWS)
    figure.set_figwidth(6 + 2 * columns)
    figure.legend(handles=handles, loc="outside right center", fontsize=7, ncols=columns, frameon=False)


def _style(index: int) -> dict[str, Any]:
    """Colour and marker of a method: all pairs differ for up to 120 methods."""
    return {"color": f"C{index % 10}", "marker": MARKERS[(index // 10 + index) % len(MARKERS)]}


def _speedup(pyplot: Any, data: FigureData) -> Any:
    """Bars of the median speed-up of every method, with p10 to p90."""
    temperatures = data.temperatures()
    if not temperatures:
        return None
    names = list(dict.fromkeys(entry["method"] for entry in data.entries()))
    height = 0.8 / len(temperatures)
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.2 * len(names) * (0.4 + 0.6 * len(temperatures))))
    for index, temperature in enumerate(temperatures):
        speedups = {entry["method"]: entry["speedup"] for entry in data.entries(temperature)}
        bars = [
            (y + index * height - 0.4 + height / 2, speedups[name]) for y, name in enumerate(names) if name in speedups
        ]
        axes.barh(
            [y for y, _ in bars],
            [value["median"] for _, value in bars],
            height,
            xerr=_error_bars([value for _, value in bars]),
            label=f"T = {temperature:g}",
            error_kw={"elinewidth": 0.8},
        )
    axes.set_yticks(range(len(names)), [data.label(name) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up over plain AR, median and p10 to p90")
    _title(figure, "Speed-up over plain AR", data.source)
    _legend_right(figure)
    return figure


def _error_bars(spreads: Sequence[Record]) -> list[list[float]]:
    """Distances of p10 and p90 from the median."""
    return [[s["median"] - s["p10"] for s in spreads], [s["p90"] - s["median"] for s in spreads]]


def _cell_maps(column: str, title: str) -> Callable[[Any, FigureData], Any]:
    """Draws a column per cell: for each method the mean over images, and below it the first image."""

    def draw(pyplot: Any, data: FigureData) -> Any:
        entries = data.speculative_maps()
        shown = _sample(entries, MAX_MAPS)
        if not shown:
            return None
        columns, bands = min(len(shown), MAPS_PER_ROW), -(-len(shown) // MAPS_PER_ROW)
        size = (max(PANEL * columns + 1, 5), (2 * PANEL + 0.6) * bands + 0.6)
        figure, axes = pyplot.subplots(2 * bands, columns, figsize=size, squeeze=False)
        for panel in axes.flat:
            panel.set_axis_off()
        # The square root of the scale keeps methods with few accepted tokens apart where one accepts many.
        high = max(float(np.max(entry["first"][column])) for entry in shown)
        norm = pyplot.matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=max(high, 1))
        picture = data.pictures.get(data.max_temperature)
        for index, entry in enumerate(shown):
            band, position = divmod(index, MAPS_PER_ROW)
            mean, first = axes[2 * band][position], axes[2 * band + 1][position]
            image = mean.imshow(entry["mean"][column], norm=norm)
            mean.set_title(f"{textwrap.fill(data.label(entry['method']), 24)}\nmean over pictures", fontsize=7)
            _overlay(pyplot, first, np.array(entry["first"][column]), norm, picture)
            first.set_title("first picture", fontsize=7)
        _title(figure, f"{title}, T = {data.max_temperature:g}{_shown(shown, entries)}", data.source)
        figure.colorbar(image, ax=axes, shrink=0.7)
        return figure

    return draw


def _overlay(pyplot: Any, axes: Any, values: Any, norm: Any, picture: Path | None) -> None:
    """A map, over the grey image that it belongs to if there is one."""
    if picture is not None:
        extent = (-0.5, values.shape[1] - 0.5, values.shape[0] - 0.5, -0.5)
        axes.imshow(pyplot.imread(picture)[..., :3].mean(-1), cmap="gray", extent=extent)
    axes.imshow(values, norm=norm, alpha=1.0 if picture is None else 0.7)


def _entropy(pyplot: Any, data: FigureData) -> Any:
    """Top-1 probability and entropy of the target's distribution per cell."""
    entries = [entry for entry in data.maps if entry["method"] == PLAIN and "entropy" in entry["mean"]]
    if not entries:
        return None
    size = (4 * PANEL + 1, PANEL * len(entries) + 1)
    figure, axes = pyplot.subplots(len(entries), 4, figsize=size, squeeze=False)
    panels = [(kind, column) for column in ("top1", "entropy") for kind in ("mean", "first")]
    for row, entry in zip(axes, entries, strict=True):
        for panel, (kind, column) in zip(row, panels, strict=True):
            values = np.array(entry[kind][column])
            high = 1.0 if column == "top1" else max(float(np.nanmax(values)), 1e-3)
            image = panel.imshow(values, vmin=0, vmax=high)
            label = "top-1 probability" if column == "top1" else "entropy (nats)"
            pictures = "mean over pictures" if kind == "mean" else "first picture"
            panel.set_title(f"{label}, T = {entry['temperature']:g}\n{pictures}", fontsize=8)
            panel.set_axis_off()
            figure.colorbar(image, ax=panel, shrink=0.7)
    _title(figure, "Target distribution per cell", data.source)
    return figure


def _curves(
    column: str, title: str, xlabel: str, ylabel: str, first: int, scale: str
) -> Callable[[Any, FigureData], Any]:
    """Draws the distribution of a count, one curve per method; `first` is the x value of the first count."""

    def draw(pyplot: Any, data: FigureData) -> Any:
        entries = [entry for entry in data.speculative_maps() if entry[column]]
        shown = _sample(entries, MAX_CURVES)
        if not shown:
            return None
        figure, axes = pyplot.subplots(figsize=(8, 4))
        for index, entry in enumerate(shown):
            share = np.array(entry[column]) / sum(entry[column])
            axes.plot(
                np.arange(len(share)) + first, share, markersize=3, label=data.label(entry["method"]), **_style(index)
            )
        axes.set(xlabel=xlabel, ylabel=ylabel, yscale=scale)
        _title(figure, f"{title}, T = {data.max_temperature:g}{_shown(shown, entries)}", data.source)
        _legend_right(figure)
        return figure

    return draw


def _scatter(axes: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Points (method, x, y, fill); every method has a colour and a marker, named in the legend."""
    styles = {name: _style(index) for index, name in enumerate(dict.fromkeys(point[0] for point in points))}
    labelled: set[str] = set()
    for name, x, y, fill in points:
        style = styles[name]
        face = style["color"] if fill == "full" else "none"
        label = None if name in labelled else name
        axes.scatter(
            x, y, s=32, marker=style["marker"], edgecolors=style["color"], facecolors=face, label=label, alpha=0.8
        )
        labelled.add(name)


def _nodes(pyplot: Any, data: FigureData) -> Any:
    """Tokens per pass against the nodes that a pass verifies."""
    if not data.entries():
        return None
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    points = [
        (data.label(entry["method"]), entry["nodes"], entry["tau"], "full" if entry["temperature"] else "none")
        for entry in sorted(data.entries(), key=lambda entry: -entry["temperature"])
    ]
    _scatter(axes, points)
    axes.set(xlabel="nodes per pass", ylabel="tokens per pass (tau)")
    _title(figure, "Tokens per pass against nodes (hollow: T = 0)", data.source)
    _legend_right(figure)
    return figure


def _quality(pyplot: Any, data: FigureData) -> Any:
    """Speed-up against the distance from plain autoregression, for relaxed and exact methods."""
    entries = [entry for entry in data.entries(data.max_temperature) if entry["against_plain"] is not None]
    if not any("LANTERN" in entry["method"] for entry in entries):
        return None
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    _scatter(
        axes,
        [
            (
                data.label(entry["method"]),
                entry["against_plain"]["mmd"],
                entry["speedup"]["median"],
                "none" if entry["against_plain"]["p"] < 0.01 else "full",
            )
            for entry in entries
        ],
    )
    axes.set(xlabel="distance of the codes from those of plain AR (MMD)", ylabel="speed-up over plain AR")
    title = f"Speed-up against quality, T = {data.max_temperature:g} (hollow: another distribution, p < 0.01)"
    _title(figure, title, data.source)
    _legend_right(figure)
    return figure


def _sweep(pyplot: Any, data: FigureData) -> Any:
    """Heat map of the speed-up over beta and l_d, and the options that were changed one at a time."""
    speedups = {entry["method"]: entry["speedup"] for entry in data.entries(data.max_temperature)}
    pairs = {tuple(name.split(", ")): value["median"] for name, value in speedups.items() if name.startswith("beta=")}
    if not pairs:
        return None
    betas, steps = (list(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1))
    table = np.array([[pairs.get((beta, step), np.nan) for step in steps] for beta in betas])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.8))
    image = left.imshow(table, aspect="auto")
    left.set_xticks(range(len(steps)), steps)
    left.set_yticks(range(len(betas)), betas)
    middle = (np.nanmin(table) + np.nanmax(table)) / 2
    for (row, column), value in np.ndenumerate(table):
        colour = "black" if value > middle else "white"  # readable on both ends of the colour map
        left.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    left.set_title("speed-up by beta and l_d", fontsize=9)
    figure.colorbar(image, ax=left)
    single = {name: value for name, value in speedups.items() if "," not in name}
    medians = [value["median"] for value in single.values()]
    right.errorbar(
        medians, range(len(single)), xerr=_error_bars(list(single.values())), fmt="o", markersize=3, linewidth=0.8
    )
    right.set_yticks(range(len(single)), list(single), fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("speed-up, median and p10 to p90")
    right.set_title("one option changed at a time", fontsize=9)
    _title(figure, f"Sensitivity, T = {data.max_temperature:g}", data.source)
    return figure


def _pass_time(pyplot: Any, records: Sequence[Record]) -> Any:
    """Time of a pass against its number of nodes, with the bound that the memory bandwidth sets."""
    timed = [record for record in records if record.get("verify_ms")]
    if not timed:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for index, record in enumerate(timed):
        sizes, times = [int(size) for size in record["verify_ms"]], list(record["verify_ms"].values())
        weights = record.get("weights", "full")
        label = f"{record['model'].removeprefix('random:')}, {record['dtype'] if weights == 'full' else weights}"
        label += "" if record.get("numerics") == "row-invariant" else ", fastest"
        axes.plot(sizes, times, **_style(index), label=label)
        axes.axhline(record["floor_ms"], linestyle=":", color=f"C{index}", label="bound: weights read once")
    axes.set(xscale="log", xlabel="nodes per pass", ylabel="milliseconds", ylim=(0, None))
    ticks = sorted({int(size) for record in timed for size in record["verify_ms"]})
    axes.set_xticks(ticks, labels=[str(size) for size in ticks])
    axes.minorticks_off()
    machines = dict.fromkeys(hardware_label(record["machine"]) for record in timed)
    _title(figure, "Time of a pass, random weights", ", ".join(machines))
    _legend_right(figure)
    return figure


RUN_FIGURES: dict[str, Callable[..., Any]] = {
    "speedup": _speedup,
    "accepted": _cell_maps("accepted", "Accepted tokens in the pass of each cell"),
    "entropy": _entropy,
    "ranks": _curves(
        "ranks", "Rank of the accepted token", "rank among its siblings", "share of accepted tokens", 1, "log"
    ),
    "lengths": _curves("lengths", "Accepted tokens per pass", "accepted tokens", "share of passes", 0, "linear"),
    "depth": _cell_maps("depth", "Tree depth in the pass of each cell"),
    "width": _cell_maps("width", "Tree width in the pass of each cell"),
    "nodes": _nodes,
    "quality": _quality,
    "sweep": _sweep,
}
