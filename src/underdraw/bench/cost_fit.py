"""Does time follow from passes, nodes, levels and expanded nodes? A straight line against the clock.

Two lines are tried: costs measured before and after the run on pictures with other trees, and costs fitted to the
pictures of every other prompt, which then predict the pictures in between. Knows no model and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, Any]
PARTS = ("prompt", "plain", "base", "node", "level", "expanded")


def steady(row: Row) -> float:
    """Seconds of a picture without those in which the machine stood still, which older rows do not tell apart."""
    return float(row["seconds"]) - float(row.get("stalled_seconds", 0.0))


def predicted(row: Row, costs: Mapping[str, float]) -> float:
    """Seconds of a picture by costs in milliseconds."""
    line = np.array([costs.get(part, 0.0) for part in PARTS])  # older costs know of no expanded nodes
    return float(_terms([row])[0] @ line) / 1000


def measured(rows: Sequence[Row]) -> dict[str, float]:
    """What a prompt, a plain pass, one with a tree, and each of its nodes, levels and expansions cost: milliseconds."""
    return dict(zip(PARTS, (1000 * _least_squares(rows)).round(4).tolist(), strict=True))


def check_costs(rows: Sequence[Row], costs: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """For each method and temperature: measured seconds, and both predictions of them as ratios to it."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["temperature"]), []).append(row)
    fitted = fit(rows)
    found = []
    for (method, temperature), own in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        name = kind(own[0]["settings"], temperature)
        known = costs.get(name)
        held = [row for row in own if row["prompt"] % 2 == 1]
        line = fitted.get(name)
        found.append(
            {
                "method": method, "temperature": temperature,
                "measured": round(sum(map(steady, own)) / len(own), 4),
                "by_costs": None if known is None else _ratio(own, [predicted(row, known) for row in own]),
                "by_fit": None if line is None or not held else _ratio(held, list(_terms(held) @ line)),
            }
        )  # fmt: skip
    return found


def fit(rows: Sequence[Row]) -> dict[str, NDArray[np.float64]]:
    """Seconds of each part for each kind of pass, from prompts of even number."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row["prompt"] % 2 == 0:
            kinds.setdefault(kind(row["settings"], row["temperature"]), []).append(row)
    return {name: _least_squares(own) for name, own in kinds.items()}


def kind(settings: Mapping[str, str], temperature: float) -> str:
    """Passes cost alike if the same drafter drafts and the same verifier judges, by chance or without."""
    verifier = settings["verifier"].partition(":")[0]
    greedy = " greedy" if verifier != "exact" and not temperature else ""
    return f"{settings['drafter']} {verifier}{greedy}"


def _terms(rows: Sequence[Row]) -> NDArray[np.float64]:
    """How many of each part a row has: (rows, parts). Older rows do not say how many nodes were expanded."""
    names = ("passes", "tree_passes", "tree_nodes", "tree_levels", "tree_expanded")
    terms = np.array([[1, *(row.get(name, 0) for name in names)] for row in rows], dtype=np.float64)
    terms[:, 1] -= terms[:, 2]
    return terms


def _least_squares(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Costs that are not negative, found by dropping those that would be until none is.

    A prompt costs what it has cost; the rest is fitted. Rows are weighted by their time, so that it is relative errors
    that count.
    """
    terms, seconds = _terms(rows), np.array([steady(row) for row in rows])
    costs = np.zeros(terms.shape[1])
    costs[0] = np.mean([row.get("prompt_seconds", 0.0) for row in rows])  # older rows do not say
    left = (seconds - costs[0]) / seconds
    terms /= seconds[:, None]
    active = np.asarray(terms.any(axis=0), dtype=np.bool_)
    active[0] = False
    while active.any():
        found = np.linalg.lstsq(terms[:, active], left, rcond=None)[0]
        if (found >= 0).all():
            costs[active] = found
            break
        places = np.flatnonzero(active)
        active[places[found < 0]] = False
    return costs


def _ratio(rows: Sequence[Row], seconds: Sequence[float]) -> float:
    return round(float(sum(seconds) / sum(map(steady, rows))), 4)
