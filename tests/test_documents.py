"""Every command in README and docs works as written, and the benchmarks say what they should."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import call
from PIL import Image

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SET_UP = ("python3 -m venv", "pip install", "pytest")  # what .ci/run does, in a fresh environment


def commands() -> list[str]:
    """The lines of all bash blocks that are not set-up."""
    lines = [line.strip() for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return sorted({line for line in lines if line and not line.startswith(("#", *SET_UP))})


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.S)


def shell(command: str, folder: Path = ROOT) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}  # tests share the machine
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files of the repository that a page links to or shows exist."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_there_are_commands_to_run() -> None:
    assert len(commands()) >= 3


def others() -> list[str]:
    """Commands that have no test of their own below."""
    return [c for c in commands() if "training" not in c and "proposals" not in c and not c.startswith("underdraw ")]


@pytest.mark.parametrize("command", others())
def test_documented_commands_run(command: str) -> None:
    assert shell(command).strip()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that documented commands speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "prompts.txt").write_text("a red fox\na house\n")
    (tmp_path / "data" / "PartiPrompts.tsv").write_text("Prompt\tCategory\tChallenge\tNote\nfox\ta\tb\tc\n")
    captions = [{"image_id": 1, "id": 1, "caption": "A fox."}]
    (tmp_path / "data" / "captions_val2017.json").write_text(json.dumps({"annotations": captions}))
    return tmp_path


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(("underdraw generate", "underdraw env"))])
def test_documented_commands_draw(command: str, small_model: Path, place: Path) -> None:
    """With a small model in the place of the embedded one, which would take minutes for all of them."""
    words = shlex.split(command)[1:]
    done = call(*words, *(["--model", str(small_model)] if words[0] == "generate" else []))
    assert done.code == 0, done.err
    assert done.out.strip()
    for option, value in itertools.pairwise(words):
        if option in ("-o", "--heatmap", "--compare-image"):
            assert (place / value).exists()


def test_every_command_of_ours_has_a_test() -> None:
    """`generate` and `env` above, `train` below, `models` beside its guide, the others in tests/evaluation."""
    known = {"generate", "env", "train", "models", "bench", "plot", "evaluate"}
    assert {c.split()[1] for c in commands() if c.startswith("underdraw ")} <= known


def test_the_readmes_first_command(tmp_path: Path) -> None:
    """As it stands there, with the embedded model: a picture that is not blank, and the very one of plain sampling."""
    block = (ROOT / "README.md").read_text().partition("<!-- show -->\n```bash\n")[2].partition("```")[0]
    (command,) = [line for line in block.splitlines() if not line.startswith(SET_UP)]
    assert "identical pixels" in shell(command, tmp_path)
    (picture,) = tmp_path.glob("*.png")
    assert Image.open(picture).size == (192, 192) and np.asarray(Image.open(picture)).std() > 20


WITH_PYTHON = (ROOT / "README.md", ROOT / "docs" / "python.md")
PYTHON = [(page.stem, block) for page in WITH_PYTHON for block in blocks(page, "python")]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=lambda part: part[:8])
def test_documented_python_runs(
    page: str, block: str, small_model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands there, but for the model."""
    exec(compile(block.replace('"tiny"', repr(str(small_model))), page, "exec"), {"__name__": page})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", [c for c in commands() if re.match(r"underdraw train|python -m underdraw", c)])
def test_documented_training_commands_are_understood(command: str) -> None:
    """They need a pack and minutes of a GPU; what can go wrong in a document is the part and the names of options."""
    words, given = shlex.split(command), set(re.findall(r"--[a-z-]+", command))
    known = set(re.findall(r"--[a-z-]+", shell(f"{shlex.join(words[:3])} --help")))
    assert given <= known


def test_proposals_as_documented() -> None:
    """Coupled beats topk by a wide margin, calibrated growth beats ranking by q, and the documents say so."""
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


def test_the_loop_costs_milliseconds() -> None:
    """A loose bound, for slow and busy machines; docs/lab.md has the measured figure."""
    result = json.loads(shell(f"{sys.executable} benchmarks/overhead.py --repeats 5 --json"))["milliseconds"]
    assert {"plan", "grow", "verify", "commit", "loop"} <= set(result)
    assert result["loop"] < 12
