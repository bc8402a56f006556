"""docs/models.md: its example family works as written, its commands run, its tables tell the truth."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import published
import pytest
import torch
from along import Case
from commands import call
from safetensors.torch import save_file

from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.inspect import inspect, list_families
from underdraw.pipeline import Pipeline
from underdraw.registry import families

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)


def test_the_example_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written to a file as it stands there, registered, it loads a checkpoint and draws the same with every tree."""
    (example,) = blocks("python")
    (tmp_path / "grey.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(families._entries, "grey", re.findall(r'grey = "(.*)"', PAGE)[0])
    config = {**published.CHAMELEON, "vocab_size": 19, "model_type": "grey"}
    state = published.random([*published.decoder_shapes(config), ("lm_head.weight", (19, 32))])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    plain, drafted = (
        Pipeline.from_pretrained(folder, drafter="jacobi", tree=tree)("dark bright", seed=3, output_type="codes").images
        for tree in ("none", "adjacency")
    )
    assert torch.equal(plain, drafted) and plain.shape == (1, 4, 4)
    assert Pipeline.from_pretrained(folder, drafter="jacobi")("dark", seed=1).images[0].size == (4, 4)
    assert inspect(open_checkpoint(folder)).family == "grey"
    assert "grey" in [item["family"] for item in list_families()]
    del sys.modules["grey"]


def test_documented_commands_about_models() -> None:
    found = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("underdraw models")]
    assert len(found) == 2
    assert call(*shlex.split(found[0])[1:]).code == 0


OURS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("underdraw")]


@pytest.mark.parametrize("command", OURS, ids=lambda command: command[-14:])
def test_commands_beside_theirs(
    command: str, anole: Case, converted: Case, lumina: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, with small checkpoints in the place of the published ones."""
    monkeypatch.chdir(tmp_path)
    published.drafter(tmp_path / "anole_drafter", "anole")
    published.drafter(tmp_path / "llamagen_drafter", "llamagen")
    local = {
        "leloy/Anole-7b-v0.1-hf": anole.path,
        "jadohu/LlamaGen-T2I": converted.path,
        "Alpha-VLLM/Lumina-mGPT-7B-768": lumina.path,
        "jadohu/anole_drafter": tmp_path / "anole_drafter",
        "jadohu/llamagen_drafter": tmp_path / "llamagen_drafter",
    }
    words = [str(local.get(word, word)) for word in shlex.split(command)[1:]]
    assert any(word in command for word in local)
    done = call(*words)
    assert done.code == 0, done.err
    assert (tmp_path / words[-1]).exists()


def test_options_in_the_table_exist() -> None:
    """Every option in the column of ours is one of `underdraw generate`."""
    helped = call("generate", "--help").out
    rows = re.findall(r"^\| `--.*?\| (.*?) \|.*$", PAGE, re.M)
    given = {option for row in rows for option in re.findall(r"--[a-z-]+", row)}
    assert len(given) > 12
    known = set(re.findall(r"--[a-z-]+", helped))
    assert given <= known


def test_published_ids_in_the_page_are_those_of_the_families() -> None:
    """No name in the page that a family does not list, and no drafter left out."""
    listed = {entry["id"] for family in list_families() for entry in family["published"]}
    heads = {head for family in list_families() for head in family["drafters"]}
    for name in heads | {entry for entry in listed if entry.endswith(("-hf", "stage1_256.pt", "T2I", "B_256.pt"))}:
        assert name in PAGE or name == "BAAI/Emu3-Gen-hf", name
