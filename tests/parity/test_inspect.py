"""`underdraw models` and `underdraw models inspect`, as functions and as commands."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_writers
import pytest
import small_checkpoint
import torch
from commands import call
from parity_cases import ParityCase

from underdraw.errors import UnsupportedError
from underdraw.models.checkpoint import Checkpoint, open_checkpoint
from underdraw.models.inspect import inspect, list_families
from underdraw.registry import families

FAMILIES = ("anole", "lumina", "t2i", "c2i", "converted", "janus", "emu3", "glm_image", "simplear", "lumina2")


def command(*words: str) -> str:
    done = call("models", *words)
    assert done.code == 0, done.err
    return done.out


def test_every_family_is_listed() -> None:
    listed = list_families()
    assert [item["family"] for item in listed] == families.names()
    assert all(item["summary"] and item["published"] for item in listed)
    assert all(entry["licence"] for item in listed for entry in item["published"])


def test_commands_print_the_reports(anole: ParityCase) -> None:
    listed = json.loads(command("--json"))["families"]
    assert listed == list_families()
    assert "jadohu/anole_drafter" in command()
    report = json.loads(command("inspect", str(anole.path), "--json"))
    assert report == json.loads(json.dumps(inspect(open_checkpoint(anole.path)).json()))
    assert "model, anole" in command("inspect", str(anole.path))


def test_inspecting_an_unsupported_folder_is_an_error(tmp_path: Path) -> None:
    done = call("models", "inspect", str(tmp_path))
    assert done.code == 2 and "is not supported: it is neither a model" in done.err


@pytest.mark.parametrize(
    "name", ["anole", "lumina", "t2i", "c2i", "converted", "janus", "emu3", "glm_image", "simplear"]
)
def test_report_matches_the_loaded_model(request: pytest.FixtureRequest, name: str) -> None:
    """Parameters, sizes and settings are those of the loaded model, though no weights are read."""
    case: ParityCase = request.getfixturevalue(name)
    report, net = inspect(open_checkpoint(case.path)), case.model.target.net
    assert (report.kind, report.family) == ("model", case.model.family)
    parameters = sum(parameter.numel() for parameter in net.parameters())
    assert report.decoder["parameters"] == parameters
    assert report.memory["float32"].weights == 4 * parameters == 2 * report.memory["bfloat16"].weights
    assert report.sizes == [str(size) for size in case.model.sizes]
    assert report.settings["guidance"] == case.model.defaults.guidance
    assert report.bytes > 0 and report.drafters == ["jacobi-tree"]


def test_drafter_in_the_models_folder_is_reported(tmp_path: Path) -> None:
    checkpoint_writers.write_anole(tmp_path)
    checkpoint_writers.write_drafter(tmp_path / "drafter-lantern", "anole")
    assert inspect(open_checkpoint(tmp_path)).drafters == ["drafter-lantern (in the checkpoint's folder)"]


def test_published_drafter_is_reported_for_its_target(tmp_path: Path) -> None:
    """From the configuration alone; the file holds one tensor of the model."""
    checkpoint_writers.write_shards(tmp_path, {"model.layers.0.self_attn.q_norm.weight": torch.zeros(32, 128)}, 1)
    report = inspect(Checkpoint(tmp_path, "anole", {"model_type": "chameleon"}))
    assert report.drafters == ["jadohu/anole_drafter"] and report.note == ""
    assert report.decoder["parameters"] == pytest.approx(7.013e9 - (65536 - 8192) * 4096, rel=1e-3)
    assert report.memory["bfloat16"].cache == 2 * 1024 * 512 * 1024  # two rows of 1024 tokens of 512 KiB


def test_drafters_and_image_tokenizers_are_reported(tmp_path: Path, c2i: ParityCase) -> None:
    checkpoint_writers.write_drafter(tmp_path, "anole")
    assert inspect(open_checkpoint(tmp_path)).kind == "drafter"
    report = inspect(open_checkpoint(c2i.path.parent / "vq_ds16_c2i.pt"))
    assert report.kind == "image tokenizer" and "64 codes with 8 dimensions" in report.note


def test_tiny_model_and_its_drafter_are_reported(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "m")
    report = inspect(open_checkpoint(tmp_path / "m"))
    assert report.family == "tiny" and report.files == 3 and report.decoder["layers"] == 1
    assert inspect(open_checkpoint(tmp_path / "m" / "drafter")).kind == "drafter"


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="neither a model of a family"):
        inspect(open_checkpoint(tmp_path))
