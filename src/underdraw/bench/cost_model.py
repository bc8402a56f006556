"""Linear cost model of an image: seconds = prefill + passes + nodes + levels + expanded nodes, each times its cost.

It is checked in two ways: with costs measured before and after the run on images with other trees, and with costs
fitted to the images of even prompts, which then predict those of odd prompts. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.extras import require_package

Row = Mapping[str, Any]
PARTS = ("prompt", "plain", "base", "node", "level", "expanded")
"""Terms of the model: prefill, a pass without a tree, a pass with one, and a node, level and expanded node of it."""


def active_seconds(row: Row) -> float:
    """Seconds of an image without stalls of the machine, which older rows do not record."""
    return float(row["seconds"]) - float(row.get("stalled_seconds", 0.0))


def predict_seconds(row: Row, costs: Mapping[str, float]) -> float:
    """Seconds of an image by costs in milliseconds."""
    weights = np.array([costs.get(part, 0.0) for part in PARTS])  # older costs have no term for expanded nodes
    return float(_terms([row])[0] @ weights) / 1000


def fit_costs(rows: Sequence[Row]) -> dict[str, float]:
    """Milliseconds of every term, fitted to images."""
    return dict(zip(PARTS, (1000 * _fit(rows)).round(4).tolist(), strict=True))


def check_costs(rows: Sequence[Row], costs: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """For each method and temperature: measured seconds, and both predictions as ratios to it."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["temperature"]), []).append(row)
    fitted = _fit_even_prompts(rows)
    checks = []
    for (method, temperature), group in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        name = pass_type(group[0]["settings"], temperature)
        # Older runs did not measure greedy passes separately.
        measured_costs, fitted_costs = costs.get(name, costs.get(name.removesuffix(" greedy"))), fitted.get(name)
        held_out = [row for row in group if row["prompt"] % 2 == 1]
        by_costs = by_fit = None
        if measured_costs is not None:
            by_costs = _ratio(group, [predict_seconds(row, measured_costs) for row in group])
        if fitted_costs is not None and held_out:
            by_fit = _ratio(held_out, list(_terms(held_out) @ fitted_costs))
        measured = round(sum(map(active_seconds, group)) / len(group), 4)
        check = {"method": method, "temperature": temperature, "measured": measured}
        checks.append({**check, "by_costs": by_costs, "by_fit": by_fit})
    return checks


def pass_type(settings: Mapping[str, str], temperature: float) -> str:
    """Passes with the same drafter and verifier cost the same; inexact verifiers have a cheaper greedy path."""
    verifier = settings["verifier"].partition(":")[0]
    greedy = " greedy" if verifier != "exact" and not temperature else ""
    return f"{settings['drafter']} {verifier}{greedy}"


def _fit_even_prompts(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """Seconds of every term for each type of pass, from prompts with even numbers."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["prompt"] % 2 == 0:
            groups.setdefault(pass_type(row["settings"], row["temperature"]), []).append(row)
    return {name: _fit(group) for name, group in groups.items()}


def _terms(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Counts of every term: (rows, parts). Older rows have no count of expanded nodes."""
    columns = ("passes", "tree_passes", "tree_nodes", "tree_levels", "tree_expanded")
    terms = np.array([[1, *(row.get(column, 0) for column in columns)] for row in rows], dtype=np.float64)
    terms[:, 1] -= terms[:, 2]  # passes -> passes without a tree
    return terms


def _fit(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Non-negative least squares of seconds over terms.

    Prefill is not fitted: its time is in the rows. Every row is divided by its time, which minimises relative errors.
    """
    optimize = require_package("scipy.optimize", "bench", "fitting the cost model")
    terms, seconds = _terms(rows), np.array([active_seconds(row) for row in rows])
    costs = np.zeros(len(PARTS))
    costs[0] = np.mean([row.get("prompt_seconds", 0.0) for row in rows])  # older rows do not have it
    costs[1:] = optimize.nnls(terms[:, 1:] / seconds[:, None], (seconds - costs[0]) / seconds)[0]
    return costs


def _ratio(rows: Sequence[Row], predicted: Sequence[float]) -> float:
    return round(float(sum(predicted) / sum(map(active_seconds, rows))), 4)
