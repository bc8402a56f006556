"""docs/experiments.md and docs/experiments/: every preset has a page, and the index leads to all of them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from commands import call

from underdraw.bench.presets import PRESETS
from underdraw.metrics.networks import WEIGHTS
from underdraw.prompts import load_prompts

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "experiments.md"
PAGES = {path.stem: path for path in sorted((ROOT / "docs" / "experiments").glob("*.md"))}
DATA = os.environ.get("UNDERDRAW_DATA")


def commands(*pages: Path) -> list[list[str]]:
    """The `underdraw` commands in bash blocks, without the first word."""
    blocks = [block for page in pages for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S)]
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[0] == "underdraw"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_command_on_a_page_and_results_on_one_of_its_own(name: str) -> None:
    page = PAGES.get(name, PAGES["more"])
    text = page.read_text()
    matching = [words for words in commands(page) if words[0] == "bench" and words[words.index("--preset") + 1] == name]
    (words,) = matching
    options = set(re.findall(r"--[a-z-]+", call("bench", "--help").out))
    assert {word for word in words if word.startswith("--")} <= options
    assert words[words.index("--out") + 1] == f"benchmarks/results/{name}/cpu"
    assert len(load_prompts(str(ROOT / words[words.index("--prompts") + 1]))) >= min(64, PRESETS[name].prompts or 64)
    if page.stem == name:
        assert f"<!-- results: ../../benchmarks/results/{name}/h200 -->" in text
    assert PRESETS[name].question in " ".join(text.split())
    assert f"](experiments/{page.stem}.md)" in INDEX.read_text()


def test_index_fits_on_a_screen_and_links_every_page() -> None:
    text = INDEX.read_text()
    assert len(text) < 12_000
    assert all(f"](experiments/{name}.md)" in text for name in PAGES)


def test_cli_page_names_the_same_commands() -> None:
    ours = [words for words in commands(ROOT / "docs" / "cli.md") if words[0] in ("bench", "plot", "evaluate")]
    assert ours and all(words in commands(INDEX, PAGES["quality"]) for words in ours)


def test_metric_weights_are_documented() -> None:
    text = PAGES["quality"].read_text()
    for weight in WEIGHTS.values():
        assert f"`{weight.name}`" in text and f"]({weight.source})" in text


@pytest.mark.skipif(DATA is None, reason="the published files are not part of the repository; see UNDERDRAW_DATA")
@pytest.mark.parametrize(("name", "count"), [("parti", 1632), ("coco", 5000)])
def test_published_prompt_files_are_read(name: str, count: int) -> None:
    prompts = load_prompts(name, Path(DATA or ""))
    assert len(prompts) == count and all(prompts)
