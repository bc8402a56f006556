"""README and docs are true: links lead somewhere, commands run in order in a fresh clone, Python examples run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
from commands import call
from PIL import Image

ROOT = Path(__file__).parent.parent
CARD = ROOT / "src" / "underdraw" / "assets" / "tiny" / "README.md"
TRAINING, RECIPE = ROOT / "docs" / "training.md", ROOT / "recipes" / "tiny" / "README.md"
PAGES = [ROOT / "README.md", CARD, RECIPE, *sorted((ROOT / "docs").rglob("*.md"))]
SET_UP = ("python3 -m venv", "pip install", "pytest")  # .ci/run runs these in a new environment
# Commands that need a training set, a GPU or hours: only their options are checked.
LONG = re.compile(r"underdraw train|python -m recipes|--preset|python benchmarks/card.py")
# The training that docs/training.md describes runs in short; a later option replaces an earlier one.
SHORT_TRAINING = {
    "samples": ["--count", "4", "--batch", "2"],
    "drafter": ["--seconds", "0.5", "--held-out", "1", "--depth", "2", "--batch", "2", "--evaluate-images", "2"],
}
OUTPUT_OPTIONS = ("-o", "--out", "--heatmap", "--compare-image", "--trace", "--sheet")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands(page: Path) -> list[str]:
    """The lines of a page's bash blocks, in order, without set-up and comments."""
    lines = [line.strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", *SET_UP))]


def is_long(command: str, page: Path) -> bool:
    return page == RECIPE or (page != TRAINING and LONG.search(command) is not None)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shell(command: str, folder: Path = ROOT) -> str:
    """What a command prints on stdout; it must exit with 0."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}  # tests share the machine
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader: the repository's files, a file of prompts, and the published prompt sets."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("benchmarks", "examples", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "prompts.txt").write_text("a red fox\na house\na tree\na boat\n")
    (folder / "data").mkdir()
    (folder / "data" / "PartiPrompts.tsv").write_text("Prompt\tCategory\tChallenge\tNote\nfox\ta\tb\tc\n")
    captions = [{"image_id": 1, "id": 1, "caption": "A fox."}]
    (folder / "data" / "captions_val2017.json").write_text(json.dumps({"annotations": captions}))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that reads prompts as long as those of the embedded model."""
    return small_checkpoint.write(tmp_path_factory.mktemp("model") / "small", length=160)


def run(command: str, model: Path) -> str:
    """What a documented command prints, with a small model instead of the embedded one, which would take minutes."""
    words = shlex.split(command)
    takes_model = words[1] in ("generate", "bench", "train") or "--measure" in words
    replaced = ["--model", str(model)] if takes_model and words[1:3] != ["bench", "engine"] else []
    if words[1] == "bench":
        replaced += ["--limit", "1"]
    if words[1] == "train":
        replaced += SHORT_TRAINING[words[2]]
    done = call(*words[1:], *replaced)
    assert done.code == 0, f"{command}: {done.err}"
    for option, value in itertools.pairwise(words):
        if option in OUTPUT_OPTIONS:
            assert Path(value).exists(), f"{command} did not write {value}"
    return done.out


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files of the repository that a page links to or shows exist."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_pages_have_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 20


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=page_name)
def test_commands_of_a_page_run_in_order(page: Path, clone: Path, model: Path) -> None:
    for command in commands(page):
        if command.startswith("underdraw ") and not is_long(command, page):
            assert run(command, model).strip(), command


LONG_COMMANDS = sorted({command for page in PAGES for command in commands(page) if is_long(command, page)})
SHORT_COMMANDS = sorted({command for page in PAGES for command in commands(page) if not is_long(command, page)})
SCRIPTS = [command for command in SHORT_COMMANDS if not command.startswith("underdraw ")]


@pytest.mark.parametrize("command", SCRIPTS)
def test_documented_scripts_run(command: str, clone: Path) -> None:
    assert shell(command, clone).strip()


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_options_of_long_commands_exist(command: str) -> None:
    words = shlex.split(command)
    program = itertools.takewhile(lambda word: word == "-m" or not word.startswith("-"), words)
    options = set(re.findall(r"--[a-z-]+", shell(f"{shlex.join(program)} --help")))
    assert set(re.findall(r" (--[a-z-]+)", command)) <= options


def test_first_command_of_the_readme(tmp_path: Path) -> None:
    """With the embedded model: an image that is not blank, and identical to that of plain sampling."""
    block = (ROOT / "README.md").read_text().partition("<!-- show -->\n```bash\n")[2].partition("```")[0]
    (command,) = [line for line in block.splitlines() if not line.startswith(SET_UP)]
    assert "identical pixels" in shell(command, tmp_path)
    (image,) = tmp_path.glob("*.png")
    assert Image.open(image).size == (192, 192) and np.asarray(Image.open(image)).std() > 20


WITH_PYTHON = (ROOT / "README.md", ROOT / "docs" / "python.md", ROOT / "docs" / "integrations.md")
PYTHON = [(page.stem, block) for page in WITH_PYTHON for block in blocks(page, "python")]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=lambda part: part[:8])
def test_documented_python_runs(
    page: str, block: str, model: Path, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small model instead of the embedded one."""
    exec(compile(block.replace('"tiny"', repr(str(model))), page, "exec"), {"__name__": page})
    assert capsys.readouterr().out.strip()


def test_proposals_as_documented() -> None:
    """Coupled drafts beat topk by a wide margin, calibrated growth beats ranking by q, and docs/lab.md says so."""
    result = json.loads(shell(f"{sys.executable} benchmarks/proposals.py --json"))
    rows = {(row["proposal"], row["tree"]): row["tokens_per_pass"] for row in result["rows"]}
    for tree in {tree for proposal, tree in rows if proposal.startswith("topk")}:
        assert rows["coupled, calibrated", tree] > 1.8 * rows["topk (EAGLE-2)", tree]
        assert rows["coupled, calibrated", tree] > 1.4 * rows["coupled, ranked by q", tree]
    lab = (ROOT / "docs" / "lab.md").read_text()
    for (proposal, tree), value in rows.items():
        shown = re.search(rf"\| {re.escape(proposal)} \| `{re.escape(tree)}` \| ([0-9.]+) \|", lab)
        assert shown, f"docs/lab.md has no row for {proposal}, {tree}"
        # Other processors round differently, and one token then changes the rest of an image.
        assert abs(float(shown[1]) - value) < 0.15


def test_overhead_of_the_loop_is_milliseconds() -> None:
    """A loose bound, for slow and busy machines; docs/lab.md has the measured figure."""
    result = json.loads(shell(f"{sys.executable} benchmarks/overhead.py --repeats 5 --json"))["milliseconds"]
    assert {"plan (adjacency)", "plan (budget)", "grow", "verify", "commit", "loop"} <= set(result)
    assert result["loop"] < 12
