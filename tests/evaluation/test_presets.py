"""Every preset parses, runs with one prompt on a small model, and becomes figures, a report and a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import call
from PIL import Image

from underdraw.bench.cost_fit import check_costs
from underdraw.bench.figures import FIGURES
from underdraw.bench.methods import PLAIN
from underdraw.bench.presets import PRESETS
from underdraw.registry import policies, verifiers

ROOT = Path(__file__).parents[2]
ALWAYS = {"speedup", "accepted", "laws", "ranks", "lengths", "depth", "width", "nodes"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_parse(name: str) -> None:
    methods = PRESETS[name].methods
    assert len({method.name for method in methods}) == len(methods) and PLAIN not in {m.name for m in methods}
    for method in methods:
        judge = verifiers.build(method.verifier)
        assert method.tree == "auto" or policies.build(method.tree)
        assert method.proposal in ("auto", *judge.proposals)


def test_the_paper_has_its_rows() -> None:
    """Tables I and II, and the methods that are compared with them."""
    names = [method.name for method in PRESETS["paper-main"].methods]
    assert {"EAGLE-1", "EAGLE-2", "LANTERN", "LANTERN++", "ADT-Tree", "ADT-Tree + LANTERN", "SJD"} < set(names)
    assert sum(name.startswith("ours") for name in names) == 2 and PRESETS["paper-main"].temperatures == (0.0, 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run(name: str, mini: Path, prompts: Path, tmp_path: Path) -> None:
    temperatures = [] if name == "paper-main" else ["--temperature", 1]  # the main one as it stands
    common = ["-m", mini, "--prompts", prompts, "--limit", 1, *temperatures, "--json"]
    done = call("bench", "--preset", name, *common, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    count = len(PRESETS[name].methods) + 1
    assert len(done.record["entries"]) == count * (2 if name == "paper-main" else 1)
    for entry in done.record["entries"]:
        method = {m.name: m for m in PRESETS[name].methods}.get(entry["method"])
        exact = method is None or method.verifier == "exact"
        assert not exact or entry["equal_images"] == "1/1", entry["method"]
    if name == "paper-main":  # drawing takes longer than a small run
        check_figures(name, tmp_path)


def check_figures(name: str, tmp_path: Path) -> None:
    """All figures are there and show something; the report holds them and every method."""
    drawn = call("plot", tmp_path / "run", "--json")
    assert drawn.code == 0, drawn.err
    figures = {Path(file).stem for file in drawn.record["files"] if file.endswith(".png")}
    assert figures == ALWAYS
    for figure in figures:
        pixels = np.asarray(Image.open(tmp_path / "run" / "figures" / f"{figure}.png").convert("RGB"))
        assert min(pixels.shape[:2]) > 100 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 8, figure
        assert (tmp_path / "run" / "figures" / f"{figure}.svg").read_text().count("<path") > 5
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(figures) and not re.search(r"(?:src|href)='http", page)
    assert PRESETS[name].question.partition(",")[0] in page
    assert all(method.name in page for method in PRESETS[name].methods)


def test_every_figure_of_a_full_run(tmp_path: Path) -> None:
    """Speed against quality needs more pictures than a quick test draws, the sweep a run of its own: made by hand."""
    spread = {"median": 1.5, "p10": 1.2, "p90": 1.9}
    entries = [
        {
            "method": name, "temperature": 1.0, "prompts": 9, "rows": 9, "speedup": spread,
            "tau": 2.0, "tau_spread": spread, "depth": 3.0, "nodes": 9.0, "draft_share": 0.2, "seconds": spread,
            "memory": 10**9, "equal_codes": 0.5, "equal_images": "0/9",
            "against_plain": {"mmd": delta / 9, "p": 0.5 - delta},
        }
        for name, delta in (("LANTERN", 0.1), ("LANTERN 2", 0.495), ("beta=0.5, l_d=1", 0.2), ("nodes=12", 0.3))
    ]  # fmt: skip
    known = {"settings": {"preset": "by hand", "device": "cpu"}, "methods": {}, "machine": None, "costs": None}
    (tmp_path / "summary.json").write_text(json.dumps({**known, "entries": entries, "cost_model": []}))
    done = call("plot", tmp_path, "--json")
    assert done.code == 0 and {Path(f).stem for f in done.record["files"]} == {
        "speedup", "nodes", "quality", "sweep", "report",
    }  # fmt: skip
    assert set(FIGURES) == ALWAYS | {"quality", "sweep"}, "every figure is drawn by some test of this file"


def test_plot_without_a_run(tmp_path: Path) -> None:
    for words, says in (
        ([], "either the folder"),
        ([tmp_path / "no"], "not a folder"),
        ([tmp_path], "holds no benchmark"),
    ):
        done = call("plot", *words)
        assert done.code == 2 and says in done.err and list(tmp_path.iterdir()) == []


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    (tmp_path / "summary.json").write_text(json.dumps({"settings": {}, "entries": [], "methods": {}}))
    done = call("plot", tmp_path)
    assert done.code == 2 and "pip install 'underdraw[bench]'" in done.err


def test_the_page_of_experiments_is_made_from_the_results(tmp_path: Path) -> None:
    """docs/experiments.md holds what `underdraw plot --page docs/experiments.md` writes, and every preset."""
    page = ROOT / "docs" / "experiments.md"
    text = page.read_text()
    for name in PRESETS:
        assert f"--preset {name} " in text
        for device in ("cpu", "h200"):
            assert f"<!-- results: ../benchmarks/results/{name}/{device} -->" in text
    before = page.stat().st_mtime_ns
    done = call("plot", "--page", page, "--json")
    assert done.code == 0 and done.record["changed"] is False and page.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["paper-main", "sensitivity"])
def test_published_times_follow_from_the_trees(name: str) -> None:
    """What pictures with other trees cost predicts every method's time to a tenth, from the raw rows on."""
    folder = ROOT / "benchmarks" / "results" / name / "cpu"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    found = check_costs(rows, json.loads((folder / "run.json").read_text())["costs"])
    wanted = len(PRESETS[name].temperatures) * (len(PRESETS[name].methods) + 1)
    assert len(found) == wanted
    assert {one["method"]: one["by_costs"] for one in found if abs(one["by_costs"] - 1) > 0.1} == {}


def test_a_page_shows_a_run(tmp_path: Path, mini: Path, prompts: Path) -> None:
    run = tmp_path / "results" / "mine"
    common = ["-m", mini, "--prompts", prompts, "--limit", 1, "--tree", "chain:depth=2", "--quiet"]
    assert call("bench", *common, "--out", run).code == 0 and call("plot", run, "--quiet").code == 0
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- results: results/mine -->\nold\n<!-- end -->\n\nkept\n")
    assert call("plot", "--page", page).code == 0
    text = page.read_text()
    assert "| chain:depth=2 | 1 | 1 |" in text and "old" not in text and text.endswith("kept\n")
    assert (
        all((tmp_path / link).is_file() for link in re.findall(r"\]\(([^)]+)\)", text))
        and "figures/speedup.png" in text
    )
    assert "changed" in call("plot", "--page", page, "--json").out and page.read_text() == text
    page.write_text("nothing")
    assert "no block" in call("plot", "--page", page).err
