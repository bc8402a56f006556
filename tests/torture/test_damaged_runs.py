"""Malformed rows of images, run.json files and benchmark rows: a resumed run heals or refuses them, loses nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_checkpoint

from torture.checks import bounded_memory, run_cases, run_hostile, snapshot
from torture.mutations import SEED, case_random, damage_json, damage_kind, damage_lines

CASES, CI_CASES = 90, 12
TIMES = ("seconds", "prompt_seconds", "draft_seconds", "stalled_seconds", "memory", "plain_seconds", "speedup")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of images and a finished benchmark."""
    folder = tmp_path_factory.mktemp("runs")
    small_checkpoint.write(folder / "model", side=3)
    (folder / "prompts.txt").write_text("a red fox\na fox\nred\n")
    for name in ("generate", "bench"):
        assert run_hostile(*command(folder, name, folder / name)).code == 0
    return folder


def command(folder: Path, name: str, out: Path) -> tuple[Any, ...]:
    shared = ("-m", folder / "model", "--prompts", folder / "prompts.txt", "--out", out, "--seed", 1, "--quiet")
    return (name, *shared, "--tree", "none") if name == "generate" else (name, *shared, "--tree", "chain:depth=2")


def rows_without_times(path: Path) -> dict[str, Any]:
    """The rows of a JSON Lines file by what identifies them, without what time changes."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    keys = [
        str(row.get("index", [row.get(key) for key in ("method", "temperature", "prompt", "repeat")])) for row in rows
    ]
    assert len(set(keys)) == len(keys), "a row is there twice"
    return {key: {k: v for k, v in row.items() if k not in TIMES} for key, row in zip(keys, rows, strict=True)}


def check_case(index: int, runs: Path, here: Path) -> int:
    rng = case_random("run", index)
    name = "generate" if index % 3 else "bench"
    lines = {"generate": ("metadata.jsonl",), "bench": ("rows.jsonl", "cells.jsonl")}[name]
    shutil.copytree(runs / name, here)
    victim = here / rng.choice([*lines, *lines, "run.json"])
    if not victim.exists():
        victim = here / lines[0]
    damage = damage_lines if victim.suffix == ".jsonl" else rng.choice([damage_json, damage_kind])
    what = f"case {index} of seed {SEED}: {name}: {victim.name}: {damage(rng, victim)}"
    before = snapshot(here)
    done = run_hostile(*command(runs, name, here), context=what)
    after = snapshot(here)
    if done.code == 2:
        assert set(before) <= set(after), f"{what}: lost {set(before) - set(after)}"
    if done.code == 0 and victim.suffix == ".jsonl":
        for line_file in lines:
            healed, expected = (rows_without_times(folder / line_file) for folder in (here, runs / name))
            is_complete = set(healed) == set(expected) if line_file != "cells.jsonl" else set(healed) <= set(expected)
            assert is_complete, what  # deleted cells are drawn again when they are needed
        assert {path.name for path in here.glob("*.png")} == {path.name for path in (runs / name).glob("*.png")}, what
    if name == "generate":
        run_hostile("evaluate", here, "--against", runs / name, context=what)
        samples = ("--images", here, "--out", here.parent / f"{here.name}-samples")
        run_hostile("train", "samples", "-m", runs / "model", *samples, context=what)
    else:
        run_hostile("plot", here, "--quiet", context=what) if index % 9 == 0 else None
    shutil.rmtree(here)
    return done.code


def test_some_damaged_runs(runs: Path, tmp_path: Path) -> None:
    run_cases(CI_CASES, lambda index: check_case(index, runs, tmp_path / str(index)))


@pytest.mark.torture
def test_damaged_runs(runs: Path, tmp_path: Path) -> None:
    with bounded_memory():
        codes = run_cases(CASES, lambda index: check_case(index, runs, tmp_path / str(index)))
    print(f"{CASES} damaged runs of seed {SEED}: {codes.count(2)} refused, {codes.count(0)} healed")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_separators_in_prompts_are_read_back(separator: str, runs: Path, tmp_path: Path) -> None:
    """Lines end at line feeds alone: in prompt files, metadata.jsonl and benchmark rows."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(f"a red{separator}fox\r\na fox\n".encode())
    options = ("-m", runs / "model", "--prompts", prompts, "--tree", "none", "--seed", 1, "--quiet")
    for expected in (2, 0):
        done = run_hostile("generate", *options[:-1], "-o", tmp_path / "run", "--json")
        assert done.code == 0 and done.record["drawn"] == expected and done.record["images"] == 2
    row = json.loads((tmp_path / "run" / "metadata.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert row["prompt"] == f"a red{separator}fox"
    assert run_hostile("evaluate", tmp_path / "run", "--against", tmp_path / "run").code == 0
    done = run_hostile("train", "samples", "-m", runs / "model", "--images", tmp_path / "run", "-o", tmp_path / "s")
    assert done.code == 0 and "2 samples of 2 texts" in done.out
