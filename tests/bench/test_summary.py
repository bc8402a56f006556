"""Summaries of rows against values by hand: medians, cost model, trees of equal depth, maps, older files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from underdraw.bench.cost_model import check_costs, fit_costs, predict_seconds
from underdraw.bench.results import ResultFolder
from underdraw.bench.sections import compare_at_equal_depth, main_table
from underdraw.bench.summary import compute_maps, drafter_label, read_summary, spread, summarise, write_summary
from underdraw.errors import ConfigError
from underdraw.io import pack_grid

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
COSTS = {"prompt": 3.0, "plain": 10.0, "base": 12.0, "node": 0.5, "level": 2.0, "expanded": 0.25}


def make_row(method: str, prompt: int, **values: Any) -> dict[str, Any]:
    """A row whose time follows from COSTS, with some columns replaced."""
    has_tree = method != "AR"
    row: dict[str, Any] = {
        "method": method, "temperature": 1.0, "prompt": prompt, "repeat": 0, "passes": 10 + prompt, "tokens": 20,
        "tree_passes": (8 + prompt) * has_tree, "tree_nodes": (60 + 7 * prompt**2) * has_tree,
        "tree_levels": (30 + 11 * (prompt % 3)) * has_tree, "tree_expanded": (40 + 13 * (prompt % 4)) * has_tree,
        "draft_seconds": 0.01, "memory": 100 + prompt, "prompt_seconds": 0.003, "tau": 20 / (10 + prompt),
        "mean_depth": 2.0, "mean_nodes": 6.0, "equal_codes": 1.0, "equal_image": True,
        "settings": {"drafter": "auto" if has_tree else "forced", "verifier": "exact"},
    }  # fmt: skip
    row["seconds"] = predict_seconds(row, COSTS)
    return {**row, **values}


def test_predicted_time_by_hand() -> None:
    """Prefill, two plain passes, eight with a tree, sixty nodes, thirty levels, forty expanded nodes."""
    expected = 3 + 2 * 10 + 8 * 12 + 60 * 0.5 + 30 * 2 + 40 * 0.25
    assert predict_seconds(make_row("tree", 0), COSTS) == pytest.approx(expected / 1000)
    older = {part: cost for part, cost in COSTS.items() if part != "expanded"}
    assert predict_seconds(make_row("tree", 0), older) == pytest.approx((expected - 10) / 1000)


def test_correct_cost_model_predicts_ratio_one() -> None:
    rows = [make_row(name, prompt) for name in ("AR", "tree") for prompt in range(10)]
    for check in check_costs(rows, {"auto exact": COSTS, "forced exact": COSTS}):
        assert check["by_costs"] == 1.0 and check["by_fit"] == pytest.approx(1.0, abs=1e-3)


def test_fit_recovers_linear_costs() -> None:
    rows = [make_row("tree", prompt) for prompt in (0, 1, 2, 3, 5)]
    assert fit_costs([*rows, make_row("AR", 0)]) == pytest.approx(COSTS, abs=1e-3)


def test_wrong_cost_model_is_detected() -> None:
    """Twice the predicted time; and odd prompts that are slower than the even ones."""
    slow = [make_row("tree", prompt, seconds=2 * make_row("tree", prompt)["seconds"]) for prompt in range(10)]
    assert check_costs(slow, {"auto exact": COSTS})[0]["by_costs"] == 0.5
    odd = [make_row("tree", p, seconds=(1 + p % 2) * make_row("tree", p)["seconds"]) for p in range(10)]
    assert check_costs(odd, {"auto exact": COSTS})[0]["by_fit"] == pytest.approx(0.5, abs=1e-3)
    assert check_costs(slow, {})[0]["by_costs"] is None


def test_fitted_costs_are_never_negative() -> None:
    """Time that falls with the number of nodes would fit a negative cost."""
    rows = [make_row("tree", p, seconds=0.2 - make_row("tree", p)["tree_nodes"] / 1e4) for p in range(0, 20, 2)]
    assert min(fit_costs(rows).values()) >= 0
    (check,) = check_costs([*rows, *(make_row("tree", p, seconds=0.1) for p in range(1, 20, 2))], {})
    assert check["by_fit"] > 0


def test_spread_by_hand() -> None:
    assert spread([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == {"median": 6.0, "p10": 2.0, "p90": 10.0}
    assert spread([]) is None


def make_folder(path: Path, rows: list[dict[str, Any]], cells: dict[str, Any] | None = None) -> ResultFolder:
    folder = ResultFolder(path / "run")
    folder.open({}, {name: {"name": name} for name in dict.fromkeys(r["method"] for r in rows)}, overwrite=False)
    folder.start({})
    for row in rows:
        folder.append(row, cells)
    return folder


def test_entries_by_hand(tmp_path: Path) -> None:
    rows = [make_row("AR", p, seconds=4.0) for p in range(3)]
    rows += [make_row("tree", p, seconds=s, equal_image=p > 0) for p, s in enumerate((1.0, 2.0, 4.0))]
    summary = summarise(make_folder(tmp_path, rows))
    plain, tree = summary["entries"]
    assert plain["speedup"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert tree["speedup"] == {"median": 2.0, "p10": 1.2, "p90": 3.6} and tree["seconds"]["median"] == 2.0
    assert tree["tau"] == round(60 / 33, 4) and tree["memory"] == 102 and tree["equal_images"] == "2/3"
    assert tree["draft_share"] == round(0.03 / 7, 4) and tree["against_plain"] is None
    assert main_table(summary).rows[1][2:5] == ["1", "3", "2.00 (1.20-3.60)"]


def test_stalls_are_left_out_of_all_times(tmp_path: Path) -> None:
    rows = [make_row("AR", 0, seconds=4.0), make_row("tree", 0, seconds=11.0, stalled_seconds=10.0)]
    entry = summarise(make_folder(tmp_path, rows))["entries"][1]
    assert entry["speedup"]["median"] == 4.0 and entry["seconds"]["median"] == 1.0 and entry["draft_share"] == 0.01


def test_summary_is_computed_again_only_after_new_rows(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, [make_row("AR", 0), make_row("tree", 0)])
    write_summary(folder)
    assert [entry["rows"] for entry in read_summary(folder.path)["entries"]] == [1, 1]
    folder.append(make_row("AR", 1), None)
    assert [entry["rows"] for entry in read_summary(folder.path)["entries"]] == [2, 1]
    before = (folder.path / "summary.json").stat().st_mtime_ns
    read_summary(folder.path)
    assert (folder.path / "summary.json").stat().st_mtime_ns == before


def test_summary_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no measurements yet"):
        summarise(make_folder(tmp_path, []))


def make_cells(name_of_passes: str) -> dict[str, Any]:
    """Two passes: the first decoded three cells and accepted two tokens, the second one cell and none."""
    grids = {
        name_of_passes: [[-2, 0], [0, 0], [1, -2]],
        "accepted": [[0, 2], [2, 2], [0, 0]],
        "rank": [[-1, 0], [3, -1], [-1, -1]],
        "depth": [[0, 4], [4, 4], [3, 0]],
        "width": [[0, 1], [1, 1], [2, 0]],
        "codes": [[0, 0], [0, 0], [0, 0]],
    }
    return {name: pack_grid(np.array(grid)) for name, grid in grids.items()}


def test_maps_by_hand(tmp_path: Path) -> None:
    (maps,) = compute_maps(make_folder(tmp_path, [make_row("tree", 0)], make_cells("pass_index")))
    assert maps["lengths"] == [1, 0, 1] and maps["ranks"] == [1, 0, 0, 1]
    assert maps["mean"]["depth"] == maps["first"]["depth"] == [[0, 4], [4, 4], [3, 0]]


def test_comparison_at_equal_depth_interpolates() -> None:
    def entry(name: str, depth: float, tau: float, speedup: float) -> dict[str, Any]:
        return {"method": name, "temperature": 1.0, "depth": depth, "tau": tau, "speedup": {"median": speedup}}

    entries = [
        entry("ADT-Tree", 5.0, 3.3, 2.2),
        entry("EAGLE-2, depth 4", 4, 2.0, 1.0),
        entry("EAGLE-2, depth 6", 6, 3.0, 2.0),
    ]
    assert compare_at_equal_depth({"entries": entries}) == [
        "T=1, mean depth 5.00: ADT-Tree 3.30 tokens/pass, speed-up 2.20; EAGLE-2 of that depth 2.50 tokens/pass, "
        "speed-up 1.50."
    ]
    assert compare_at_equal_depth({"entries": entries[:2]}) == []  # no deeper tree to interpolate to


def test_drafter_labels() -> None:
    methods = {"AR": "forced", "a": "auto", "t": "trained", "j": "jacobi:window=4", "p": "/home/me/drafter"}
    summary = {"methods": {name: {"drafter": spec} for name, spec in methods.items()}, "settings": {"drafter": "eagle"}}
    labels = [drafter_label(summary, name) for name in methods]
    assert labels == ["-", "eagle", "trained", "jacobi:window=4", "drafter"]
    assert (
        drafter_label({**summary, "drafters": {"auto": "jacobi", "trained": "drafter-eagle"}}, "t") == "drafter-eagle"
    )


RUNS = sorted(path.parent for path in RESULTS.glob("*/*/run.json"))


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_published_summaries_follow_from_published_rows(folder: Path) -> None:
    """All numbers but the two-sample test, whose codes (cells.jsonl) are not published."""
    published = json.loads((folder / "summary.json").read_text())
    computed = summarise(ResultFolder.read(folder))
    for entries in (published["entries"], computed["entries"]):
        for entry in entries:
            del entry["against_plain"]
    assert computed["entries"] == published["entries"]
    assert [check["by_costs"] for check in computed["cost_model"]] == [
        check["by_costs"] for check in published["cost_model"]
    ]


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_published_times_follow_from_the_cost_model(folder: Path) -> None:
    """Costs measured on pictures with other trees predict times to a tenth: on a CPU all of them, on a GPU half.

    In runs without measured costs, costs fitted to half of the prompts predict half of the methods to 15 %.
    """
    run = ResultFolder.read(folder)
    checks, name = (
        check_costs(list(run.rows.values()), run.info["costs"]),
        "by_costs" if run.info["costs"] else "by_fit",
    )
    errors = {(check["method"], check["temperature"]): abs(check[name] - 1) for check in checks}
    drawn = {key.method for key in run.rows}
    assert {method for method, _ in errors} == (set(run.info["methods"]) if run.info["costs"] else drawn)
    assert statistics.median(errors.values()) < (0.1 if run.info["costs"] else 0.15)
    if folder.name == "cpu" and run.info["costs"]:
        assert {method: error for method, error in errors.items() if error > 0.1} == {}
