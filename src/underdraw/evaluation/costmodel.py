"""Does time follow from passes, nodes and levels? Predictions of a straight line against the clock.

Two lines are tried: the costs that were measured before the run, by a few passes of a new picture, and costs fitted to
the pictures of every other prompt, which then predict the pictures in between. Knows no model and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, Any]


def predicted(row: Row, costs: Mapping[str, float]) -> float:
    """Seconds of a picture by costs in milliseconds."""
    plain = row["passes"] - row["tree_passes"]
    total = costs["plain"] * plain + costs["base"] * row["tree_passes"]
    return (total + costs["node"] * row["tree_nodes"] + costs["level"] * row["tree_levels"]) / 1000


def check_costs(rows: Sequence[Row], costs: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """For each method and temperature: measured seconds, and both predictions of them as ratios to it."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["temperature"]), []).append(row)
    fitted = fit(rows)
    found = []
    for (method, temperature), own in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        drafter = own[0]["settings"]["drafter"]
        known = costs.get(drafter) or (next(iter(costs.values()), None) if drafter == "forced" else None)
        held = [row for row in own if row["prompt"] % 2 == 1]
        line = fitted.get(_kind(own[0]))
        found.append(
            {
                "method": method, "temperature": temperature,
                "measured": round(sum(row["seconds"] for row in own) / len(own), 4),
                "by_costs": None if known is None else _ratio(own, [predicted(row, known) for row in own]),
                "by_fit": None if line is None or not held else _ratio(held, list(_terms(held) @ line)),
            }
        )  # fmt: skip
    return found


def fit(rows: Sequence[Row]) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Seconds a plain pass, tree pass, node and level for each kind of pass, from prompts of even number."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["prompt"] % 2 == 0:
            kinds.setdefault(_kind(row), []).append(row)
    return {kind: _least_squares(own) for kind, own in kinds.items()}


def _kind(row: Row) -> tuple[str, str]:
    """Passes cost alike if the same drafter drafts and the same verifier judges."""
    return row["settings"]["drafter"], row["settings"]["verifier"].partition(":")[0]


def _terms(rows: Sequence[Row]) -> NDArray[np.float64]:
    names = ("passes", "tree_passes", "tree_nodes", "tree_levels")
    terms = np.array([[row[name] for name in names] for row in rows], dtype=np.float64)
    terms[:, 0] -= terms[:, 1]
    return terms


def _least_squares(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Costs that are not negative, found by dropping those that would be until none is.

    Rows are weighted by their time, so that it is relative errors that count.
    """
    terms, seconds = _terms(rows), np.array([row["seconds"] for row in rows])
    terms, seconds = terms / seconds[:, None], np.ones_like(seconds)
    costs, active = np.zeros(terms.shape[1]), terms.any(axis=0)
    while active.any():
        found = np.linalg.lstsq(terms[:, active], seconds, rcond=None)[0]
        if (found >= 0).all():
            costs[active] = found
            break
        places = np.flatnonzero(active)
        active[places[found < 0]] = False
    return costs


def _ratio(rows: Sequence[Row], seconds: Sequence[float]) -> float:
    return round(float(sum(seconds) / sum(row["seconds"] for row in rows)), 4)
