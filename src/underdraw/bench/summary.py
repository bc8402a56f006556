"""What a run says: one entry a method and temperature, with medians and spread, summed from rows and cells alone.

Speed-ups are ratios to plain autoregression on the same prompt in the same turn. Knows no model and no torch.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.bench.cost_fit import check_costs, steady
from underdraw.bench.methods import PLAIN
from underdraw.bench.results import ROWS, RUN, Key, Store, read_json, write_json
from underdraw.errors import ConfigError
from underdraw.io import atomic_write, unpack_grid
from underdraw.metrics.two_sample import two_sample

SUMMARY, TABLE, MAPS = "summary.json", "summary.csv", "maps.json"
FACTS = ("settings", "methods", "machine", "costs")
SHOWN = ("accepted", "depth", "width", "entropy", "top1")
ENOUGH = 8  # pictures of a method below which no test against plain autoregression is worth its name


def summarise(store: Store) -> dict[str, Any]:
    """The summary of a run's rows so far."""
    if not store.rows:
        raise ConfigError(
            f"{store.folder} holds no measurements yet; run `underdraw bench --out {store.folder}` first."
        )
    temperatures = sorted({key.temperature for key in store.rows})
    entries = [
        entry(store, name, temperature)
        for temperature in temperatures
        for name in store.about["methods"]
        if any(key.method == name and key.temperature == temperature for key in store.rows)
    ]
    return {
        **{fact: store.about.get(fact) for fact in FACTS},
        "entries": entries,
        "cost_model": check_costs(list(store.rows.values()), store.about.get("costs") or {}),
    }


def entry(store: Store, method: str, temperature: float) -> dict[str, Any]:
    """One method at one temperature."""
    found = {key: row for key, row in store.rows.items() if key.method == method and key.temperature == temperature}
    rows, keys = list(found.values()), list(found)
    passes, seconds = sum(row["passes"] for row in rows), sum(map(steady, rows))
    plain = {key: store.rows.get(key._replace(method=PLAIN)) for key in keys}
    ratios = [steady(other) / steady(found[key]) for key, other in plain.items() if other is not None]
    same = [row["equal_image"] for row in rows]
    return {
        "method": method, "temperature": temperature, "prompts": len({key.prompt for key in keys}), "rows": len(rows),
        "speedup": spread(ratios), "tau": round(sum(row["tokens"] for row in rows) / passes, 4),
        "tau_spread": spread([row["tau"] for row in rows]),
        "depth": round(sum(row["mean_depth"] * row["passes"] for row in rows) / passes, 4),
        "nodes": round(sum(row["mean_nodes"] * row["passes"] for row in rows) / passes, 4),
        "draft_share": round(sum(row["draft_seconds"] for row in rows) / seconds, 4),
        "seconds": spread([steady(row) for row in rows]), "memory": max(row["memory"] for row in rows),
        "equal_codes": round(float(np.mean([row["equal_codes"] for row in rows])), 5),
        "equal_images": f"{sum(same)}/{len(same)}",
        "against_plain": against_plain(store, keys),
    }  # fmt: skip


def against_plain(store: Store, keys: Sequence[Key]) -> dict[str, Any] | None:
    """Distance of a method's codes from plain autoregression's for the same prompts, with a permutation p-value."""
    drawn = [key for key in keys if key.repeat == 0 and key in store.cells]
    drawn = [key for key in drawn if key._replace(method=PLAIN) in store.cells]
    if len(drawn) < ENOUGH or drawn[0].method == PLAIN:
        return None
    ours, plain = ([_codes(store, key) for key in side] for side in (drawn, [k._replace(method=PLAIN) for k in drawn]))
    found = two_sample(np.stack(ours), np.stack(plain), paired=True)
    return {"mmd": round(found.statistic, 6), "p": round(found.p_value, 5)}


def _codes(store: Store, key: Key) -> NDArray[np.int32]:
    return unpack_grid(store.cells[key]["codes"], f"the cells of {store.folder}")


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 10th and 90th percentile; None of nothing."""
    if not values:
        return None
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}


def maps(store: Store) -> list[dict[str, Any]]:
    """Means over pictures of what happened at every cell, one picture's own values, and counts of lengths and ranks."""
    found = []
    for temperature in sorted({key.temperature for key in store.cells}):
        for name in store.about["methods"]:
            cells = {key.prompt: value for key, value in store.cells.items() if key[:2] == (name, temperature)}
            if cells:
                found.append({"method": name, "temperature": temperature, **_maps(store, cells)})
    return found


def _maps(store: Store, cells: dict[int, dict[str, Any]]) -> dict[str, Any]:
    where = f"the cells of {store.folder}"
    columns: dict[str, list[NDArray[np.int32]]] = {}
    for prompt in sorted(cells):
        for name, packed in cells[prompt].items():
            if isinstance(packed, dict):
                columns.setdefault(name, []).append(unpack_grid(packed, where))
    shown = {name: np.stack(values) for name, values in columns.items() if name in SHOWN}
    scale = {"entropy": 1000, "top1": 1000}  # they were kept as thousandths
    lengths = np.concatenate(
        [_per_pass(tree, kept) for tree, kept in zip(columns["pass_index"], columns["accepted"], strict=True)]
    )
    ranks = np.concatenate([rank[rank >= 0] for rank in columns["rank"]])
    return {
        "mean": {name: (values.mean(0) / scale.get(name, 1)).round(3).tolist() for name, values in shown.items()},
        "first": {name: (values[0] / scale.get(name, 1)).round(3).tolist() for name, values in shown.items()},
        "lengths": np.bincount(lengths).tolist(),
        "ranks": np.bincount(ranks).tolist() if len(ranks) else [],
    }


def _per_pass(tree: NDArray[np.int32], column: NDArray[np.int32]) -> NDArray[np.int32]:
    """One value a pass of a column that holds it in every cell that the pass has drawn."""
    drawn = tree >= 0
    return column[drawn][np.unique(tree[drawn], return_index=True)[1]]


def write_summary(store: Store) -> dict[str, Any]:
    """Write summary.json, summary.csv and maps.json beside the rows; returns the summary."""
    summary = summarise(store)
    write_json(store.folder / SUMMARY, summary)
    with atomic_write(store.folder / TABLE) as file:
        file.write(as_csv(summary).encode())
    if store.cells:
        with atomic_write(store.folder / MAPS) as file:
            file.write("\n".join(["[", ",\n".join(json.dumps(one) for one in maps(store)), "]\n"]).encode())
    return summary


def read_summary(folder: Path) -> dict[str, Any]:
    """A run's summary. One that is missing, or older than the last rows, is made of the rows."""
    if (folder / SUMMARY).is_file():
        found: dict[str, Any] = read_json(folder / SUMMARY)
        rows = folder / ROWS
        if not rows.is_file() or rows.read_bytes().count(b"\n") == sum(one["rows"] for one in found["entries"]):
            return found
    if (folder / RUN).is_file():
        return write_summary(Store.read(folder))
    raise ConfigError(f"{folder} holds no benchmark; name the folder that `underdraw bench --out` has written.")


def as_csv(summary: dict[str, Any]) -> str:
    """One line a method and temperature."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    flat = [_flat(one) for one in summary["entries"]]
    writer.writerow(flat[0])
    writer.writerows(one.values() for one in flat)
    return text.getvalue()


def _flat(one: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    nested = {"speedup": ("median", "p10", "p90"), "tau_spread": ("median", "p10", "p90"),
              "seconds": ("median", "p10", "p90"), "against_plain": ("mmd", "p")}  # fmt: skip
    for key, value in one.items():
        if key in nested:
            flat.update({f"{key}_{part}": (value or {}).get(part, "") for part in nested[key]})
        else:
            flat[key] = value
    return flat
