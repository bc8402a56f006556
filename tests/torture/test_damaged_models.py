"""Damaged model folders: every file of a small model and its drafter, changed by structured mutation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_checkpoint
from PIL import Image

from torture.checks import bounded_memory, run_cases, run_hostile, snapshot
from torture.mutations import SEED, case_random, damage_file

CASES, CI_CASES = 320, 24
GENERATE = ("--seed", 1, "--tree", "adjacency:nodes=12", "--quiet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with every file that a folder can have."""
    folder = small_checkpoint.write(tmp_path_factory.mktemp("torture") / "model", side=3)
    (folder / "underdraw.json").write_text(json.dumps({"drafter": "drafter", "tree": "chain", "verifier": "exact"}))
    (folder / "words.json").write_text(json.dumps({"words": ["fox", "red"], "animals": ["fox"], "more": {"a": ["b"]}}))
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> bytes:
    out = model.parent / "expected.png"
    assert run_hostile("generate", "red fox", "-m", model, "-o", out, *GENERATE).code == 0
    return Image.open(out).tobytes()


def check_case(index: int, model: Path, expected: bytes, here: Path) -> int:
    """Damage one file, load the model with it, and inspect it."""
    rng = case_random("model", index)
    files = sorted(path for path in model.rglob("*") if path.is_file())
    damaged = here / "damaged"
    shutil.copytree(model, damaged)
    victim = files[index % len(files)].relative_to(model)
    what = f"case {index} of seed {SEED}: {damage_file(rng, damaged / victim)}"
    before, out = snapshot(damaged), here / "out"
    out.mkdir()
    done = run_hostile("generate", "red fox", "-m", damaged, "-o", out / "a.png", *GENERATE, context=what)
    assert snapshot(damaged) == before, f"{what}: the model's folder was changed"
    assert sorted(snapshot(out)) == (["a.png"] if done.code == 0 else []), what
    if done.code == 0 and "drafter" in victim.parts:
        assert Image.open(out / "a.png").tobytes() == expected, f"{what}: a drafter changed the image"
    if done.code == 2:
        assert len(done.err.splitlines()) == 1, (what, done.err)
    run_hostile("models", "inspect", damaged, context=what)
    run_hostile("models", damaged, "--words", context=what)
    drafter = ("--drafter", damaged / "drafter") if "drafter" in victim.parts else ()
    if drafter:
        second = run_hostile("generate", "red fox", "-m", model, *drafter, "-o", out / "b.png", *GENERATE, context=what)
        assert second.code == 2 or Image.open(out / "b.png").tobytes() == expected, what
    shutil.rmtree(here)
    return done.code


def test_some_damaged_models(model: Path, expected: bytes, tmp_path: Path) -> None:
    run_cases(CI_CASES, lambda index: check_case(index, model, expected, tmp_path / str(index)))


@pytest.mark.torture
def test_damaged_models(model: Path, expected: bytes, tmp_path: Path) -> None:
    with bounded_memory():
        codes = run_cases(CASES, lambda index: check_case(index, model, expected, tmp_path / str(index)))
    print(f"{CASES} damaged models of seed {SEED}: {codes.count(2)} refused, {codes.count(0)} drawn")
    assert codes.count(2) > CASES / 2
