"""The whole recipe on a small pack: tokenizer (killed and resumed), decoder, samples, drafter, grading."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from commands import call, run_script, start

from recipes.tiny import (
    captions,
    grade_colours,
    grade_loss,
    grade_subjects,
    grade_variety,
    train_decoder,
    train_drafter,
)
from recipes.tiny.data import Pack
from underdraw.nn.weights import load_weights
from underdraw.training.trainer import load_state

ROOT = Path(__file__).parents[2]


def train_tokenizer_killed_once(pack: Pack, out: Path) -> None:
    """Train in a process that is killed after its first checkpoint, and again until the budget is spent."""
    options = ["--pack", pack.path, "--out", out, "--smoke", "--batch", 4, "--device", "cpu", "--evaluate-every", 0.5]
    program = ("-m", "recipes.tiny.train_tokenizer")
    process = start(*options, "--seconds", 600, cwd=ROOT, program=program)
    deadline = time.monotonic() + 240
    while not (out / "state.pt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.communicate()
    state = load_state(out)
    assert state is not None and state["steps"] > 0
    process = start(*options, "--seconds", state["seconds"] + 1, cwd=ROOT, program=program)
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "held-out PSNR" in printed and f"at step {state['steps']}" in errors
    assert load_weights(out)[1]["progress"]["steps"] > state["steps"]


@pytest.mark.usefixtures("pixel_features")
def test_recipe_trains_and_grades_a_model(pack: Pack, tmp_path: Path) -> None:
    model, samples = tmp_path / "tiny", tmp_path / "samples"
    train_tokenizer_killed_once(pack, model / "tokenizer")
    (model / "config.json").write_text(json.dumps({"model_type": "underdraw-tiny"}))

    options = ["--pack", pack.path, "--tokenizer", model / "tokenizer", "--out", model / "decoder", "--smoke"]
    for pause in (1, 2):
        done = run_script(train_decoder, *options, "--batch", 4, "--seconds", 2, "--pause", pause, "--device", "cpu")
        assert done.code == 0, done.err
        assert "loss on held-out subjects" in done.out

    texts = tmp_path / "captions.txt"
    assert run_script(captions, "--pack", pack.path, "--model", model, "--count", 6, "--out", texts).code == 0
    done = call("train", "samples", "--model", model, "--prompts", texts, "--count", 6, "--batch", 3, "--out", samples)
    assert done.code == 0, done.err
    options = ["--pack", pack.path, "--model", model, "--samples", samples, "--out", model / "drafter-eagle"]
    sizes = ["--depth", 2, "--batch", 2, "--held-out", 2, "--evaluate-images", 2]
    done = run_script(train_drafter, *options, *sizes, "--seconds", 1)
    assert done.code == 0, done.err
    assert "recipes.tiny.train_drafter" in (model / "drafter-eagle" / "README.md").read_text()

    prompts, statistics = tmp_path / "prompts.txt", tmp_path / "statistics.json"
    prompts.write_text(texts.read_text().splitlines()[0] + "\n")
    options = ["--model", model, "--prompts", prompts, "--limit", 1, "--temperature", 1, "--out", statistics, "--quiet"]
    done = call("evaluate", "statistics", *options)
    assert done.code == 0, done.err
    assert run_script(grade_loss, "--pack", pack.path, "--model", model, "--into", statistics, "--count", 2).code == 0
    assert json.loads(statistics.read_text())["loss"]["train"]["loss"] > 0
    options = ["--pack", pack.path, "-m", model, "--count", 1, "--candidates", 8, "--batch", 4]
    done = run_script(grade_subjects, *options, "--out", tmp_path / "subjects.json", "--drafter", "jacobi", "--json")
    assert done.code == 0, done.err
    assert {entry["set"] for entry in done.record["sets"]} >= {"training", "held-out", "new pair"}
    grade_seeds_and_colours(model, tmp_path)
    shutil.rmtree(model)


def grade_seeds_and_colours(model: Path, folder: Path) -> None:
    """The measures of variety and colours, with their sheets."""
    kinds, coloured = folder / "kinds.json", folder / "coloured.txt"
    kinds.write_text(json.dumps({"plain": ["a t1", "a t2"], "photo": ["a photo of a beach"]}))
    coloured.write_text("a red t1\na small blue t2, 3D render\n")
    common = ["-m", model, "--drafter", "jacobi", "--batch", 4, "--json"]
    options = ["--prompts", kinds, "--seeds", 2, "--out", folder / "variety.json", "--sheet", folder / "seeds.jpg"]
    done = run_script(grade_variety, *options, *common)
    assert done.code == 0, done.err
    plain, photo = json.loads((folder / "variety.json").read_text())["kinds"]
    assert len(plain["equal_codes_by_prompt"]) == 2 and 0 <= plain["equal_codes"] < 1 and photo["entropy"] > 0
    options = ["--prompts", coloured, "--seed", 3, "--out", folder / "colours.json", "--sheet", folder / "colours.jpg"]
    done = run_script(grade_colours, *options, *common)
    assert done.code == 0, done.err
    record = json.loads((folder / "colours.json").read_text())
    assert [entry["requested"] for entry in record["prompts"]] == ["red", "blue"] and record["seed"] == 3
    assert all((folder / name).stat().st_size > 1000 for name in ("seeds.jpg", "colours.jpg"))
