"""The preset `kinds`: prompts by kind of picture, and the table with a column per kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_checkpoint
from commands import call
from PIL import Image

from underdraw.bench.kinds import kinds_sections
from underdraw.bench.presets import PRESETS
from underdraw.bench.records import read_record, record_sections
from underdraw.errors import ConfigError
from underdraw.prompts import load_prompt_kinds, load_prompts

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts_kinds.json"


def test_prompts_of_all_kinds_take_turns() -> None:
    kinds = load_prompt_kinds(str(PROMPTS))
    assert list(kinds) == load_prompts(str(PROMPTS)) and len(kinds) == 40
    assert list(kinds.values())[:5] == ["plain", "gradient", "scene", "portrait", "photo"]
    assert all(list(kinds.values()).count(kind) == 8 for kind in kinds.values())
    assert load_prompt_kinds(str(ROOT / "benchmarks" / "prompts64.txt")) == {}


@pytest.mark.parametrize(("content", "message"), [
    ('{"plain": ["a fox"], "photo": [3]}', "'photo' of .* must be a list of prompts"),
    ('{"plain": ["a fox"], "photo": ["a fox"]}', "holds a prompt twice"),
    ('{"plain": "a fox"}', "annotations|list of prompts"),
    ("{}", "annotations"),
])  # fmt: skip
def test_damaged_files_are_refused_in_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts(str(tmp_path / "prompts.json"))


def test_rows_methods_and_columns_kinds(mini: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"easy": ["a red fox 1", "a red fox 3"], "hard": ["a red fox 2"]}))
    options = ["-m", mini, "--prompts", prompts, "--limit", 2, "--temperature", 1, "--json"]
    result = call("bench", "--preset", "kinds", *options, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["cost_model"] is not None and "kinds" not in (tmp_path / "run" / "summary.csv").read_text()
    (section,) = kinds_sections(summary)
    assert section.table is not None
    assert section.table.columns == ("method", "easy", "hard", "all", "identical")
    rows = {row[0]: row for row in section.table.rows}
    assert set(rows) == {"AR", *(method.name for method in PRESETS["kinds"].methods)}
    for method in PRESETS["kinds"].methods:
        assert method.verifier != "exact" or rows[method.name][-1] == "2 of 2", method.name
        assert "x** (" in rows[method.name][1]
    assert rows["AR"][1:4] == ["1.00"] * 3

    del summary["entries"][-1]["kinds"]["hard"]  # as in a run that was stopped
    (section,) = kinds_sections(summary)
    assert section.table is not None and section.table.rows[-1][2] == "-"

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: run#kinds -->\n<!-- end -->\nafter\n")
    assert call("plot", "--page", page).code == 0
    text = page.read_text()
    assert text.count("| method | easy | hard | all | tokens per pass | identical |") == 1 and "drafting" not in text
    total = summary["entries"][-1]["kinds"]["all"]
    assert f"** ({total['speedup']['p10']:.2f} to" in text and f"| {total['tau']:.2f} | 2 of 2 |" in text
    assert "| AR |" not in text
    assert text.startswith("before") and text.endswith("after\n")
    assert call("plot", tmp_path / "run").code == 0
    assert "plain decoding of the same picture" in (tmp_path / "run" / "report.html").read_text()


def test_acceptance_maps_come_from_the_cells_of_a_run(tmp_path: Path) -> None:
    prompts, run = tmp_path / "prompts.json", tmp_path / "run"
    prompts.write_text(json.dumps({"plain": ["a red fox 1"], "photo": ["a red fox 2"]}))
    model = small_checkpoint.write(tmp_path / "small", side=8)
    options = ["-m", model, "--prompts", prompts, "--tree", "trunk:nodes=16", "--drafter", "jacobi-tree"]
    assert call("bench", *options, "--out", run).code == 0
    words = ["benchmarks/acceptance_maps.py", run, "--method", "trunk:nodes=16", "--json", tmp_path / "maps.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words += ["--model", model, "--out", tmp_path / "maps.png"]
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    (section,) = record_sections(read_record(tmp_path / "maps.json"))
    assert section.table is not None and section.table.columns[2:4] == ("row above", "left, 12 cells")
    table = json.loads((tmp_path / "maps.json").read_text())["kinds"]
    assert set(table) == {"plain", "photo", "all"} and table["all"]["passes"] > 2
    assert all(-1 <= table["all"][name] <= 1 for name in ("above", "left", "above-right", "both", "previous"))
    assert Image.open(tmp_path / "maps.png").width > 300


def test_readme_shows_speed_by_kind() -> None:
    text = (ROOT / "README.md").read_text()
    assert "kinds/h200#kinds -->" in text and "| Jacobi tree, row above |" in text
