"""docs/models.md: its example family works as written, its commands run, its tables are correct."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import checkpoint_writers
import pytest
import torch
from commands import call
from safetensors.torch import save_file

from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.inspect import inspect, list_families
from underdraw.pipeline import Pipeline
from underdraw.registry import families

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_example_family_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered under the entry point of the page, it loads a checkpoint and decodes the same with every tree."""
    (example,) = code_blocks("python")
    (tmp_path / "grey.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(families._entries, "grey", re.findall(r'grey = "(.*)"', PAGE)[0])
    config = {**checkpoint_writers.CHAMELEON, "vocab_size": 19, "model_type": "grey"}
    shapes = [*checkpoint_writers.decoder_shapes(config), ("lm_head.weight", (19, 32))]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(checkpoint_writers.random_state(shapes), folder / "model.safetensors")
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


def test_models_commands_run() -> None:
    commands = [
        line for block in code_blocks("bash") for line in block.splitlines() if line.startswith("underdraw models")
    ]
    assert len(commands) == 2
    assert all(call(*shlex.split(command)[1:]).code == 0 for command in commands)


GENERATE_COMMANDS = [
    line for block in code_blocks("sh") for line in block.splitlines() if line.startswith("underdraw generate")
]
PUBLISHED = {item["id"]: family["family"] for family in list_families() for item in family["published"]}
LLAMAGEN_FIXTURES = {"jadohu/LlamaGen-T2I": "converted", "FoundationVision/LlamaGen/c2i_B_256.pt": "c2i"}
# Images of their sizes take minutes even with small weights; tests of these families draw smaller ones.
LARGE_FAMILIES = ("glm_image", "simplear", "lumina2")


def published_model(command: str) -> str:
    """The published checkpoint of a command."""
    (model,) = PUBLISHED.keys() & set(shlex.split(command))
    return model


LARGE_COMMANDS = [command for command in GENERATE_COMMANDS if PUBLISHED[published_model(command)] in LARGE_FAMILIES]


def test_every_published_family_has_a_command() -> None:
    assert {PUBLISHED[published_model(command)] for command in GENERATE_COMMANDS} == {*families.names()} - {"tiny"}


@pytest.mark.parametrize("command", LARGE_COMMANDS, ids=lambda command: shlex.split(command)[-1])
def test_commands_of_large_models_are_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the model, whose folder does not exist."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    words[words.index("--model") + 1] = "./missing"
    done = call(*words)
    assert done.code == 2 and "there is no model './missing'" in done.err


@pytest.mark.parametrize(
    "command",
    [command for command in GENERATE_COMMANDS if command not in LARGE_COMMANDS],
    ids=lambda command: shlex.split(command)[-1],
)
def test_generate_commands_run(
    command: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As written, with small checkpoints instead of the published ones."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    hub_id = published_model(command)
    fixture = LLAMAGEN_FIXTURES.get(hub_id, PUBLISHED[hub_id])
    words[words.index(hub_id)] = str(request.getfixturevalue(fixture).path)
    for kind in ("anole", "llamagen"):
        if f"jadohu/{kind}_drafter" in words:
            checkpoint_writers.write_drafter(tmp_path / kind, kind)
            words[words.index(f"jadohu/{kind}_drafter")] = str(tmp_path / kind)
    done = call(*words)
    assert done.code == 0, done.err
    assert (tmp_path / words[-1]).exists()


def test_options_in_the_table_exist() -> None:
    """Every option in the column of underdraw is one of `underdraw generate`."""
    rows = re.findall(r"^\| `--.*?\| (.*?) \|.*$", PAGE, re.M)
    documented = {option for row in rows for option in re.findall(r"--[a-z-]+", row)}
    existing = set(re.findall(r"--[a-z-]+", call("generate", "--help").out))
    assert len(documented) > 12
    assert documented <= existing


@pytest.mark.parametrize("family", list_families(), ids=lambda family: family["family"])
def test_table_lists_checkpoints_licences_and_drafters(family: dict[str, object]) -> None:
    rows = "\n".join(re.findall(rf"^\| `{family['family']}` \|.*$", PAGE, re.M))
    assert all(f"| {entry['licence']} |" in rows for entry in family["published"])
    assert all(f"`{drafter}`" in rows for drafter in family["drafters"])
    listed = [entry["id"] for entry in family["published"] if entry["id"].endswith(("-hf", ".pt", "T2I", "T2I-2"))]
    assert all(name in rows or "c2i" in name or name == "BAAI/Emu3-Gen-hf" for name in listed)
