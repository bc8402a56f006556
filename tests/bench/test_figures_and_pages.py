"""Figures, HTML reports and the generated blocks of Markdown pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call
from PIL import Image

from underdraw.bench import figures
from underdraw.bench.figures import RUN_FIGURES, FigureData
from underdraw.bench.presets import PRESETS

ALWAYS = {"speedup", "accepted", "entropy", "ranks", "lengths", "depth", "width", "nodes"}
SPREAD = {"median": 1.5, "p10": 1.2, "p90": 1.9}


def make_entry(method: str, p_value: float = 0.5, mmd: float = 0.1, nodes: float = 9.0) -> dict[str, Any]:
    return {
        "method": method, "temperature": 1.0, "prompts": 9, "rows": 9, "speedup": SPREAD, "tau": 2.0,
        "tau_spread": SPREAD, "depth": 3.0, "nodes": nodes, "draft_share": 0.2, "seconds": SPREAD, "memory": 10**9,
        "equal_codes": 0.5, "equal_images": "0/9", "against_plain": {"mmd": mmd, "p": p_value},
    }  # fmt: skip


def make_summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"preset": "by hand", "model": "tiny", "device": "cpu", "drafter": "eagle", "dtype": "float32"}
    machine = {"device": "cpu", "processor": "a processor", "threads": 2, "torch": "2.0", "commit": "abc"}
    facts = {"settings": {**settings, "guidance": 2.0}, "methods": {}, "machine": machine, "costs": None}
    return {**facts, "entries": entries, "cost_model": []}


def make_maps(methods: list[str]) -> list[dict[str, Any]]:
    grid = np.arange(9).reshape(3, 3).tolist()
    columns = {"accepted": grid, "depth": grid, "width": grid}
    common = {"temperature": 1.0, "mean": columns, "first": columns, "lengths": [3, 2, 1], "ranks": [3, 1]}
    return [{"method": method, **common} for method in methods]


def test_figures_and_report_of_a_run(mini: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["--preset", "lantern-delta", "-m", mini, "--prompts", prompts, "--limit", 1, "--json"]
    assert call("bench", *options, "--out", tmp_path / "run").code == 0
    result = call("plot", tmp_path / "run", "--json")
    assert result.code == 0, result.err
    names = {Path(file).stem for file in result.record["files"] if file.endswith(".png")}
    assert names == ALWAYS
    for name in names:
        pixels = np.asarray(Image.open(tmp_path / "run" / "figures" / f"{name}.png").convert("RGB"))
        assert min(pixels.shape[:2]) > 100 and len(np.unique(pixels.reshape(-1, 3), axis=0)) > 8, name
        assert (tmp_path / "run" / "figures" / f"{name}.svg").read_text().count("<path") > 5
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.count("data:image/png;base64,") == len(names) and not re.search(r"(?:src|href)=[\"']http", report)
    preset = PRESETS["lantern-delta"]
    assert preset.question.partition("'")[0] in report and all(method.name in report for method in preset.methods)


def test_quality_and_sweep_figures(tmp_path: Path) -> None:
    """They need more pictures, or another preset, than a quick run has."""
    names = ("LANTERN", "LANTERN 2", "beta=0.5, l_d=1", "nodes=12")
    entries = [make_entry(name, p_value=0.3 * index, mmd=index / 9) for index, name in enumerate(names)]
    (tmp_path / "summary.json").write_text(json.dumps(make_summary(entries)))
    result = call("plot", tmp_path, "--json")
    stems = {Path(file).stem for file in result.record["files"]}
    assert result.code == 0 and stems == {"speedup", "nodes", "quality", "sweep", "report"}
    assert set(RUN_FIGURES) == ALWAYS | {"quality", "sweep"}, "every figure is drawn by a test of this file"


def draw(name: str, data: FigureData) -> Any:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    with pyplot.rc_context({"figure.constrained_layout.use": True}):
        figure = RUN_FIGURES[name](pyplot, data)
    figure.canvas.draw()
    return figure


MANY = [f"a method with a long name, option={number}" for number in range(33)]


@pytest.mark.parametrize("name", sorted(set(RUN_FIGURES) - {"entropy", "sweep"}))
def test_text_stays_inside_figures_with_many_methods(name: str) -> None:
    """33 methods, all at nearly the same point: no text is cut off, and no axes collapse."""
    methods = [*MANY, "LANTERN"]
    entries = [make_entry(method, nodes=58 + 0.01 * index) for index, method in enumerate(methods)]
    figure = draw(name, FigureData(make_summary(entries), make_maps(methods)))
    width, height = figure.canvas.get_width_height()
    renderer = figure.canvas.get_renderer()
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [
            axes.title,
            axes.xaxis.label,
            axes.yaxis.label,
            *(axes.get_yticklabels() if name == "speedup" else []),
        ]
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in texts if text.get_text()}
    assert len(boxes) > 3
    for text, box in boxes.items():
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text
    assert min(axes.get_window_extent(renderer).width for axes in figure.axes) > 10, "a panel collapsed"


def test_titles_name_model_drafter_and_machine() -> None:
    data = FigureData(make_summary([make_entry("tree")]), make_maps(["tree"]))
    for name in ("speedup", "nodes", "lengths", "ranks", "accepted"):
        figure = draw(name, data)
        assert "tiny, drafter eagle, float32, a processor, 2 threads" in figure.get_suptitle(), name


def test_other_drafters_are_named_in_labels() -> None:
    summary = make_summary([make_entry("SJD")])
    summary["methods"] = {"SJD": {"drafter": "jacobi:window=24"}}
    assert FigureData(summary).label("SJD") == "SJD [jacobi]" and FigureData(summary).label("tree") == "tree"


def test_many_methods_are_sampled_evenly() -> None:
    assert figures._sample(list(range(33)), 5) == [0, 8, 16, 24, 32] and figures._sample([1, 2], 5) == [1, 2]


def test_sweep_numbers_are_readable_on_every_colour() -> None:
    """Dark text on light cells, light text on dark cells."""
    entries = [make_entry(f"beta={beta}, l_d=1") for beta in (0.2, 0.5)]
    entries[1]["speedup"] = {**SPREAD, "median": 2.5}
    texts = draw("sweep", FigureData(make_summary(entries))).axes[0].texts
    assert [(text.get_text(), text.get_color()) for text in texts] == [("1.50", "white"), ("2.50", "black")]


def test_plot_without_results_is_refused(tmp_path: Path) -> None:
    for words, message in (
        ([], "either the folder"),
        ([tmp_path / "no"], "not a folder"),
        ([tmp_path], "holds no benchmark"),
    ):
        result = call("plot", *words)
        assert result.code == 2 and message in result.err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["matplotlib.pyplot", "jinja2"])
def test_missing_extra_is_one_sentence(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / "summary.json").write_text(json.dumps(make_summary([make_entry("tree")])))
    result = call("plot", tmp_path)
    assert result.code == 2 and "pip install 'underdraw[bench]'" in result.err and result.err.count("\n") == 1


def test_page_shows_a_run(tmp_path: Path, mini: Path, prompts: Path) -> None:
    run = tmp_path / "results" / "mine"
    options = ["-m", mini, "--prompts", prompts, "--limit", 1, "--tree", "chain:depth=2", "--quiet"]
    assert call("bench", *options, "--out", run).code == 0 and call("plot", run, "--quiet").code == 0
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\n<!-- results: results/mine -->\nold\n<!-- end -->\n\nkept\n")
    assert call("plot", "--page", page).code == 0
    text = page.read_text()
    assert "| chain:depth=2 | drafter | 1 | 1 |" in text and "old" not in text and text.endswith("kept\n")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert all((tmp_path / link).is_file() for link in links) and "results/mine/figures/speedup.png" in links
    again = call("plot", "--page", tmp_path, "--json").record
    assert again["changed"] is False and again["pages"] == [str(page)] and page.read_text() == text
    page.write_text("nothing")
    assert "no block" in call("plot", "--page", page).err
    assert "does not exist" in call("plot", "--page", tmp_path / "no.md").err


def test_page_without_results_says_so(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results: results/none -->\n<!-- end -->\n")
    assert call("plot", "--page", page).code == 0 and "No results in `none` yet" in page.read_text()
