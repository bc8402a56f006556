"""`underdraw env`: what a bug report needs, and `--measure`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import call

from underdraw.cli.env import EXTRAS


def test_env() -> None:
    record = call("env", "--json").record
    assert {"versions", "system", "devices", "kernels", "parts"} <= set(record)
    assert record["versions"]["torch"] != "not installed" and "cpu" in record["devices"]
    text = call("env").out
    assert record["versions"]["torch"] in text and record["kernels"]["attention"] in text


def test_env_looks_for_every_extra() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert {*EXTRAS, "dev"} == set(re.findall(r"^([\w-]+) = ", section, re.M))


def test_env_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Accelerator 9", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    record = call("env", "--json").record
    assert record["devices"]["cuda:0"] == "Accelerator 9, 80 GiB, compute capability 9.0"
    assert record["kernels"]["device"] == "cuda" and "cuBLAS" in record["kernels"]["matrices"]


def test_measure_replaces_stored_costs(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERDRAW_CACHE", str(tmp_path))
    command = ("env", "--measure", "-m", small_model, "--drafter", "drafter", "--batch", 2)
    assert call(*command).code == 0
    file = tmp_path / "costs.json"
    stored = json.loads(file.read_text())
    (key,) = stored
    file.write_text(json.dumps({key: {**stored[key], "plain": 1e9}, "another machine": {}}))
    record = call(*command, "--json").record["costs"]
    assert record["stored_in"] == str(file) and record["drafter"] == "drafter" and record["images"] == 2
    stored = json.loads(file.read_text())
    assert stored[key]["plain"] == record["plain_ms"] < 1e6 and "another machine" in stored
    assert str(file) in call(*command).out


def test_measure_checks_its_options(small_model: Path) -> None:
    assert "99 should be less than or equal to 64" in call("env", "--measure", "-m", small_model, "--batch", 99).err
