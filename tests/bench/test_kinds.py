"""`benchmarks/kinds.py`: speed by kind of picture, and the table of the README that it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_checkpoint

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "kinds" / "cpu.json"


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/kinds.py", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_kinds_measures_every_kind_and_writes_the_table(tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", tmp_path / "kinds.json"
    page.write_text("before\n<!-- kinds -->\nold\n<!-- /kinds -->\nafter\n")
    model = small_checkpoint.write(tmp_path / "small", length=160, drafter=False)
    done = run_script("--limit", 1, "--model", model, "--out", out, "--page", page)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert [row["kind"] for row in record["rows"]] == ["plain", "gradient", "scene", "portrait", "photo"]
    assert all(row["is_identical"] and 0 < row["passes"] <= row["tokens"] for row in record["rows"])
    text = page.read_text()
    assert text.startswith("before\n<!-- kinds -->\nModel `small`, drafter `jacobi-tree`")
    assert text.endswith("<!-- /kinds -->\nafter\n") and "old" not in text
    assert "| portrait |" in text and "| all |" in text and "5 of 5" in text
    assert "photo: 100%" in done.stderr, "progress is shown"
    page.write_text("<!-- kinds -->\n<!-- /kinds -->\n")
    assert run_script("--render", out, "--page", page).returncode == 0
    assert page.read_text() in text


def test_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no marks\n")
    (tmp_path / "result.json").write_text(RESULT.read_text() if RESULT.exists() else "{}")
    done = run_script("--render", tmp_path / "result.json", "--page", tmp_path / "page.md")
    assert done.returncode == 1 and "<!-- kinds -->" in done.stderr


@pytest.mark.skipif(not RESULT.exists(), reason="nothing has been measured yet")
def test_table_of_the_readme_is_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text((ROOT / "README.md").read_text())
    assert run_script("--render", RESULT, "--page", page).returncode == 0
    assert page.read_text() == (ROOT / "README.md").read_text(), "run python benchmarks/kinds.py --render"
