"""What a summary says of rows, by hand: medians, the cost model, trees of equal depth, maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from underdraw.bench.cost_fit import check_costs, measured, predicted
from underdraw.bench.results import Store
from underdraw.bench.summary import maps, read_summary, spread, summarise, write_summary
from underdraw.bench.tables import lines, same_depth
from underdraw.errors import ConfigError
from underdraw.io import pack_grid, unpack_grid

COSTS = {"prompt": 3.0, "plain": 10.0, "base": 12.0, "node": 0.5, "level": 2.0, "expanded": 0.25}


def row(method: str, prompt: int, **values: Any) -> dict[str, Any]:
    """A row whose time is what COSTS say, but for what `values` change."""
    drafter = "forced" if method == "AR" else "auto"
    made: dict[str, Any] = {
        "method": method, "temperature": 1.0, "prompt": prompt, "repeat": 0, "passes": 10 + prompt, "tokens": 20,
        "tree_passes": 0 if method == "AR" else 8 + prompt, "tree_nodes": 0 if method == "AR" else 60 + 7 * prompt**2,
        "tree_levels": 0 if method == "AR" else 30 + 11 * (prompt % 3), "draft_seconds": 0.01, "memory": 100 + prompt,
        "tree_expanded": 0 if method == "AR" else 40 + 13 * (prompt % 4),
        "prompt_seconds": 0.003, "tau": 20 / (10 + prompt), "mean_depth": 2.0, "mean_nodes": 6.0,
        "equal_codes": 1.0, "equal_image": True,
        "settings": {"drafter": drafter, "verifier": "exact"},
    }  # fmt: skip
    made["seconds"] = predicted(made, COSTS)
    return {**made, **values}


def test_predicted_by_hand() -> None:
    """The prompt, two plain passes, eight with a tree, sixty nodes, thirty levels, forty expanded nodes."""
    whole = 3 + 2 * 10 + 8 * 12 + 60 * 0.5 + 30 * 2 + 40 * 0.25
    assert predicted(row("tree", 0), COSTS) == pytest.approx(whole / 1000)
    older = {part: cost for part, cost in COSTS.items() if part != "expanded"}
    assert predicted(row("tree", 0), older) == pytest.approx((whole - 10) / 1000)


def test_a_true_cost_model_is_found_true() -> None:
    rows = [row(name, prompt) for name in ("AR", "tree") for prompt in range(10)]
    for one in check_costs(rows, {"auto exact": COSTS, "forced exact": COSTS}):
        assert one["by_costs"] == 1.0 and one["by_fit"] == pytest.approx(1.0, abs=1e-3)


def test_costs_are_found_from_pictures() -> None:
    """Five trees and a plain picture say what each part costs, if a straight line is the truth."""
    rows = [row("tree", prompt) for prompt in (0, 1, 2, 3, 5)]
    assert measured([*rows, row("AR", 0)]) == pytest.approx(COSTS, abs=1e-3)


def test_a_false_cost_model_is_found_false() -> None:
    """Twice the time that the costs say; and prompts in between that are slower than the others."""
    slow = [row("tree", prompt, seconds=2 * row("tree", prompt)["seconds"]) for prompt in range(10)]
    assert check_costs(slow, {"auto exact": COSTS})[0]["by_costs"] == 0.5
    odd = [row("tree", p, seconds=(1 + p % 2) * row("tree", p)["seconds"]) for p in range(10)]
    assert check_costs(odd, {"auto exact": COSTS})[0]["by_fit"] == pytest.approx(0.5, abs=1e-3)
    assert check_costs(slow, {})[0]["by_costs"] is None


def test_costs_are_never_negative() -> None:
    """Time that falls with nodes would fit a negative cost."""
    rows = [row("tree", p, seconds=0.2 - row("tree", p)["tree_nodes"] / 1e4) for p in range(0, 20, 2)]
    rows += [row("tree", p, seconds=0.1) for p in range(1, 20, 2)]
    (found,) = check_costs(rows, {})
    assert found["by_fit"] > 0


def test_spread_by_hand() -> None:
    assert spread([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == {"median": 6.0, "p10": 2.0, "p90": 10.0}
    assert spread([]) is None


def store(tmp_path: Path, rows: list[dict[str, Any]], cells: dict[str, Any] | None = None) -> Store:
    made = Store(tmp_path / "run")
    made.open({}, {name: {"name": name} for name in dict.fromkeys(r["method"] for r in rows)}, anew=False)
    made.begin({})
    for one in rows:
        made.append(one, cells)
    return made


def test_entries_by_hand(tmp_path: Path) -> None:
    rows = [row("AR", p, seconds=4.0) for p in range(3)]
    rows += [row("tree", p, seconds=s, equal_image=p > 0) for p, s in enumerate((1.0, 2.0, 4.0))]
    summary = summarise(store(tmp_path, rows))
    plain, tree = summary["entries"]
    assert plain["speedup"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert tree["speedup"] == {"median": 2.0, "p10": 1.2, "p90": 3.6} and tree["seconds"]["median"] == 2.0
    assert tree["tau"] == round(60 / 33, 4) and tree["memory"] == 102 and tree["equal_images"] == "2/3"
    assert tree["draft_share"] == round(0.03 / 7, 4) and tree["against_plain"] is None
    assert lines(summary)[1][:5] == ["tree", "1", "3", "2.00", "1.20-3.60"]


def test_a_summary_follows_its_rows(tmp_path: Path) -> None:
    """A run that was stopped after its last summary is summed anew; one that was not is left alone."""
    run = store(tmp_path, [row("AR", 0), row("tree", 0)])
    write_summary(run)
    assert [one["rows"] for one in read_summary(run.folder)["entries"]] == [1, 1]
    run.append(row("AR", 1), None)
    assert [one["rows"] for one in read_summary(run.folder)["entries"]] == [2, 1]
    before = (run.folder / "summary.json").stat().st_mtime_ns
    read_summary(run.folder)
    assert (run.folder / "summary.json").stat().st_mtime_ns == before


def test_nothing_measured_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measurements yet"):
        summarise(store(tmp_path, []))


def test_maps_by_hand(tmp_path: Path) -> None:
    """Two passes: the first drew three cells and kept two guesses, the second one cell and none."""
    cells = {
        "pass_index": pack_grid(np.array([[-2, 0], [0, 0], [1, -2]])),
        "accepted": pack_grid(np.array([[0, 2], [2, 2], [0, 0]])),
        "rank": pack_grid(np.array([[-1, 0], [3, -1], [-1, -1]])),
        "depth": pack_grid(np.array([[0, 4], [4, 4], [3, 0]])),
        "width": pack_grid(np.array([[0, 1], [1, 1], [2, 0]])), "codes": pack_grid(np.zeros((3, 2))),
    }  # fmt: skip
    (found,) = maps(store(tmp_path, [row("tree", 0)], cells))
    assert found["lengths"] == [1, 0, 1] and found["ranks"] == [1, 0, 0, 1]
    assert found["mean"]["depth"] == found["first"]["depth"] == [[0, 4], [4, 4], [3, 0]]


def test_codes_come_back() -> None:
    codes = np.random.default_rng(0).integers(0, 2**20, (5, 7))
    assert np.array_equal(unpack_grid(pack_grid(codes), "here"), codes)
    for broken in (None, {}, {"rows": 1, "cols": 1, "data": "!"}, {**pack_grid(codes), "rows": 4}):
        with pytest.raises(ConfigError, match="the codes in here are damaged"):
            unpack_grid(broken, "here")


def test_trees_of_equal_depth() -> None:
    """Half-way between depth 4 and 6 lies the mean of their figures."""

    def entry(name: str, depth: float, tau: float, speed: float) -> dict[str, Any]:
        return {"method": name, "temperature": 1.0, "depth": depth, "tau": tau, "speedup": {"median": speed}}

    entries = [
        entry("ADT-Tree", 5.0, 3.3, 2.2),
        entry("EAGLE-2, depth 4", 4, 2.0, 1.0),
        entry("EAGLE-2, depth 6", 6, 3.0, 2.0),
    ]
    assert same_depth({"entries": entries}) == [
        "T=1, mean depth 5.00: ADT-Tree tau 3.30, SR 2.20; EAGLE-2 of that depth tau 2.50, SR 1.50."
    ]
    assert same_depth({"entries": entries[:2]}) == []  # nothing on the other side of it
