"""The commands of docs/experiments.md and of the section on measuring in docs/cli.md work as written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from commands import call

from underdraw.bench.presets import PRESETS
from underdraw.metrics.network_weights import WEIGHTS
from underdraw.prompts import load_prompts

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiments.md"
DATA = os.environ.get("UNDERDRAW_DATA")


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == "underdraw"]


def test_the_page_in_its_order(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model; presets have tests of their own, and run for hours."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    shutil.copy(PAGE, "docs/experiments.md")
    (tmp_path / "prompts.txt").write_text("fox\nred fox\nblue fox\na fox\n")
    done = 0
    for words in commands(PAGE):
        if "--preset" in words:
            continue
        model = ["--model", str(mini)] if words[0] in ("bench", "generate") else []
        result = call(*words, *model, *(["--limit", "2"] if words[0] == "bench" else []))
        assert result.code == 0, (words, result.err)
        done += 1
    assert done == 6 and (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_as_documented(name: str) -> None:
    """Every preset has one command with options that exist, a file of prompts that does, and its results' place."""
    (words,) = [w for w in commands(PAGE) if w[0] == "bench" and "--preset" in w and w[w.index("--preset") + 1] == name]
    known = set(re.findall(r"--[a-z-]+", call("bench", "--help").out))
    assert {word for word in words if word.startswith("--")} <= known
    assert words[words.index("--out") + 1] == f"benchmarks/results/{name}/cpu"
    assert len(load_prompts(str(ROOT / words[words.index("--prompts") + 1]))) >= min(64, PRESETS[name].prompts or 64)


def test_the_other_page_names_the_same_commands() -> None:
    ours = [words for words in commands(ROOT / "docs" / "cli.md") if words[0] in ("bench", "plot", "evaluate")]
    assert ours and all(words in commands(PAGE) for words in ours)


def test_weights_as_documented() -> None:
    text = PAGE.read_text()
    for weight in WEIGHTS.values():
        assert f"`{weight.name}`" in text and f"]({weight.source})" in text


@pytest.mark.skipif(DATA is None, reason="the published files are not part of the repository; see UNDERDRAW_DATA")
@pytest.mark.parametrize(("name", "count"), [("parti", 1632), ("coco", 5000)])
def test_published_files_are_read(name: str, count: int) -> None:
    prompts = load_prompts(name, Path(DATA or ""))
    assert len(prompts) == count and all(prompts)
