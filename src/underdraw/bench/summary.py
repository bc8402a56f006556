"""Statistics of a run: one entry per method and temperature, and means per cell, computed from its rows and cells.

Speed-ups are ratios to plain autoregression on the same prompt in the same turn. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.bench.cost_model import active_seconds, check_costs
from underdraw.bench.presets import PLAIN
from underdraw.bench.results import ROWS, RUN, ImageKey, ResultFolder
from underdraw.errors import ConfigError
from underdraw.extras import require_package
from underdraw.io import JsonlStore, atomic_write_json, atomic_write_text, read_json, unpack_grid
from underdraw.metrics.two_sample import two_sample

SUMMARY, TABLE, MAPS = "summary.json", "summary.csv", "maps.json"
COPIED = ("settings", "methods", "drafters", "machine", "costs")  # from run.json
MAP_COLUMNS = ("accepted", "depth", "width", "entropy", "top1")
MAP_SCALE = {"entropy": 1000, "top1": 1000}  # cells.jsonl holds them as thousandths
MIN_TEST_IMAGES = 8  # the two-sample test needs at least so many images of a method


def summarise(folder: ResultFolder) -> dict[str, Any]:
    """The summary of all rows so far."""
    if not folder.rows:
        raise ConfigError(f"{folder.path} has no measurements yet; run `underdraw bench --out {folder.path}` first.")
    pandas = require_package("pandas", "bench", "the summary of a benchmark")
    rows = pandas.DataFrame(
        [{**row, "active_seconds": active_seconds(row)} for row in folder.rows.values()]
    ).drop(columns=["settings", "machine"], errors="ignore")  # fmt: skip
    turn = ["temperature", "prompt", "repeat"]
    plain = rows.loc[rows["method"] == PLAIN, [*turn, "active_seconds"]]
    rows = rows.merge(plain, on=turn, how="left", suffixes=("", "_plain"))
    if "plain_seconds" in rows:  # of the session that drew the row; older rows do not have it
        rows["active_seconds_plain"] = rows["plain_seconds"].fillna(rows["active_seconds_plain"])
    groups = dict(list(rows.groupby(["temperature", "method"], sort=False)))
    entries = [
        summarise_method(folder, name, temperature, groups[temperature, name])
        for temperature in sorted(rows["temperature"].unique())
        for name in folder.info["methods"]
        if (temperature, name) in groups
    ]
    return {
        **{key: folder.info.get(key) for key in COPIED},
        "entries": entries,
        "cost_model": check_costs(list(folder.rows.values()), folder.info.get("costs") or {}),
    }


def summarise_method(folder: ResultFolder, method: str, temperature: float, rows: Any) -> dict[str, Any]:
    """The entry of one method at one temperature; `rows` is a DataFrame of its rows."""
    passes = rows["passes"].sum()
    by_kind = {"kinds": summarise_kinds(rows)} if "kind" in rows and rows["kind"].notna().all() else {}
    keys = [ImageKey(method, temperature, *pair) for pair in zip(rows["prompt"], rows["repeat"], strict=True)]
    return {
        "method": method,
        "temperature": float(temperature),
        "prompts": int(rows["prompt"].nunique()),
        "rows": len(rows),
        "speedup": spread((rows["active_seconds_plain"] / rows["active_seconds"]).dropna()),
        "tau": _rounded(rows["tokens"].sum() / passes),
        "tau_spread": spread(rows["tau"]),
        "depth": _rounded((rows["mean_depth"] * rows["passes"]).sum() / passes),
        "nodes": _rounded((rows["mean_nodes"] * rows["passes"]).sum() / passes),
        "draft_share": _rounded(rows["draft_seconds"].sum() / rows["active_seconds"].sum()),
        "seconds": spread(rows["active_seconds"]),
        "memory": int(rows["memory"].max()),
        "equal_codes": round(float(rows["equal_codes"].mean()), 5),
        "equal_images": f"{int(rows['equal_image'].sum())}/{len(rows)}",
        "against_plain": compare_with_plain(folder, keys),
        **by_kind,
    }


def summarise_kinds(rows: Any) -> dict[str, Any]:
    """Tokens per pass, speed-up and identical images by kind, and over all; `rows` is a DataFrame of one method."""
    groups = {**dict(list(rows.groupby("kind", sort=False))), "all": rows}
    return {
        kind: {
            "pictures": len(group),
            "tau": round(float(group["tokens"].sum() / group["passes"].sum()), 4),
            "speedup": spread((group["active_seconds_plain"] / group["active_seconds"]).dropna()),
            "identical": int(group["equal_image"].sum()),
        }
        for kind, group in groups.items()
    }


def compare_with_plain(folder: ResultFolder, keys: Sequence[ImageKey]) -> dict[str, Any] | None:
    """Two-sample test of a method's codes against those of plain autoregression for the same prompts."""
    pairs = [(key, key._replace(method=PLAIN)) for key in keys if key.repeat == 0 and key.method != PLAIN]
    pairs = [pair for pair in pairs if all(key in folder.cells for key in pair)]
    if len(pairs) < MIN_TEST_IMAGES:
        return None
    source = f"the cells of {folder.path}"
    sides = zip(*pairs, strict=True)
    codes = [np.stack([unpack_grid(folder.cells[key]["codes"], source) for key in side]) for side in sides]
    result = two_sample(*codes, paired=True)
    return {"mmd": round(result.statistic, 6), "p": round(result.p_value, 5)}


def spread(values: Any) -> dict[str, float] | None:
    """Median, 10th and 90th percentile; None without values."""
    if not len(values):
        return None
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"median": _rounded(median), "p10": _rounded(p10), "p90": _rounded(p90)}


def _rounded(value: Any) -> float:
    return round(float(value), 4)


def drafter_label(summary: Mapping[str, Any], method: str) -> str:
    """The drafter of a method. "auto" and "trained" are resolved; older runs do not record what "trained" was."""
    spec = summary["methods"].get(method, {}).get("drafter", "auto")
    if spec == "forced":
        return "-"
    names = summary.get("drafters") or {"auto": summary["settings"].get("drafter")}
    return Path(str(names.get(spec) or spec)).name


def compute_maps(folder: ResultFolder) -> list[dict[str, Any]]:
    """Per method and temperature: values per cell (mean over images, and of the first image), and counts of
    accepted lengths and ranks."""
    entries = []
    for temperature in sorted({key.temperature for key in folder.cells}):
        for name in folder.info["methods"]:
            cells = {key.prompt: value for key, value in folder.cells.items() if key[:2] == (name, temperature)}
            if cells:
                entries.append({"method": name, "temperature": temperature, **_method_maps(folder, cells)})
    return entries


def _method_maps(folder: ResultFolder, cells: dict[int, dict[str, Any]]) -> dict[str, Any]:
    source = f"the cells of {folder.path}"
    columns: dict[str, list[NDArray[np.int32]]] = {}
    for prompt in sorted(cells):
        for name, packed in cells[prompt].items():
            if isinstance(packed, dict):
                columns.setdefault(name, []).append(unpack_grid(packed, source))
    maps = {name: np.stack(grids) / MAP_SCALE.get(name, 1) for name, grids in columns.items() if name in MAP_COLUMNS}
    lengths = [_per_pass(*grids) for grids in zip(columns["pass_index"], columns["accepted"], strict=True)]
    ranks = np.concatenate([rank[rank >= 0] for rank in columns["rank"]])
    return {
        "mean": {name: grids.mean(0).round(3).tolist() for name, grids in maps.items()},
        "first": {name: grids[0].round(3).tolist() for name, grids in maps.items()},
        "lengths": np.bincount(np.concatenate(lengths)).tolist(),
        "ranks": np.bincount(ranks).tolist() if len(ranks) else [],
    }


def _per_pass(pass_index: NDArray[np.int32], column: NDArray[np.int32]) -> NDArray[np.int32]:
    """One value per pass of a column that repeats it in every cell of the pass."""
    decoded = pass_index >= 0
    return column[decoded][np.unique(pass_index[decoded], return_index=True)[1]]


def write_summary(folder: ResultFolder) -> dict[str, Any]:
    """Write summary.json, summary.csv and, if there are cells, maps.json; returns the summary."""
    summary = summarise(folder)
    atomic_write_json(folder.path / SUMMARY, summary)
    atomic_write_text(folder.path / TABLE, to_csv(summary))
    if folder.cells:
        maps = ",\n".join(json.dumps(entry) for entry in compute_maps(folder))
        atomic_write_text(folder.path / MAPS, f"[\n{maps}\n]\n")
    return summary


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run's folder; computed again if it is missing or rows were added since."""
    if (path / SUMMARY).is_file():
        summary: dict[str, Any] = read_json(path / SUMMARY, "the summary of a benchmark")
        rows = path / ROWS
        if not rows.is_file() or JsonlStore(rows).count() == sum(entry["rows"] for entry in summary["entries"]):
            return summary
    if (path / RUN).is_file():
        return write_summary(ResultFolder.read(path))
    raise ConfigError(f"{path} holds no benchmark; name a folder written by `underdraw bench --out`.")


def to_csv(summary: dict[str, Any]) -> str:
    """One line per method and temperature; nested values become columns such as speedup_median."""
    pandas = require_package("pandas", "bench", "the summary of a benchmark")
    no_test = {"mmd": None, "p": None}
    entries = [{**entry, "against_plain": entry["against_plain"] or no_test} for entry in summary["entries"]]
    entries = [{key: value for key, value in entry.items() if key != "kinds"} for entry in entries]
    columns = [  # in the order of the entries; json_normalize moves nested values to the end
        f"{key}_{part}" if part else key
        for key, value in entries[0].items()
        for part in (value if isinstance(value, dict) else ("",))
    ]
    text: str = pandas.json_normalize(entries, sep="_").to_csv(columns=columns, index=False, lineterminator="\n")
    return text
