"""A run folder resumes after any stop: no image is lost, and none is generated twice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import TERMINATED_ON_LOAD, Result, call, start
from PIL import Image

from underdraw.io import UNFINISHED
from underdraw.pipeline import Pipeline
from underdraw.run_folder import RunFolder
from underdraw.shards import StoredImage

COUNT, PASSES = 14, 35  # images, and passes of each
# `underdraw` with slow passes after the third image, so that a signal arrives inside an image on any machine.
SLOWED = f"""
import itertools, sys, time
from underdraw.cli.app import main
from underdraw.engine.step import StepRunner
passes, step = itertools.count(), StepRunner.step
def slowed(*arguments):
    time.sleep(0.1 * (next(passes) >= {3 * PASSES}))
    return step(*arguments)
StepRunner.step = slowed
sys.exit(main())
"""


@pytest.fixture
def command(small_model: Path, tmp_path: Path) -> list[object]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a red fox {i}\n" for i in range(COUNT)))
    common = ["--prompts", prompts, "-m", small_model, "--seed", 3, "--tree", "none", "--json"]
    return ["generate", *common, "-o", tmp_path / "out"]


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of the manifest, none of them cut off."""
    text = (folder / "metadata.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def finish(command: list[object], folder: Path, before: int) -> Result:
    """Run the command again; the folder must then be that of one uninterrupted run."""
    path = folder / "metadata.jsonl"
    complete = path.read_text().split("\n")[:-1] if path.exists() else []
    recorded = [folder / json.loads(line)["file_name"] for line in complete]
    times = {picture: picture.stat().st_mtime_ns for picture in recorded if picture.exists()}
    assert len(times) == before
    done = call(*command)
    assert done.code == 0, done.err
    assert done.record["drawn"] == COUNT - before and done.record["images"] == COUNT
    manifest = rows(folder)
    assert sorted(row["index"] for row in manifest) == list(range(COUNT))  # nothing lost, nothing twice
    assert all(row["prompt"] == f"a red fox {row['index']}" and row["seed"] == 3 + row["index"] for row in manifest)
    names = {row["file_name"] for row in manifest}
    assert {path.name for path in folder.iterdir()} == {*names, "run.json", "metadata.jsonl", "timings.jsonl"}
    for picture, when in times.items():  # finished images stayed untouched
        assert picture.stat().st_mtime_ns == when
    for name in names:
        Image.open(folder / name).load()
    return done


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "kill -9"])
def test_stopped_run_resumes(command: list[object], tmp_path: Path, stop: signal.Signals) -> None:
    folder = tmp_path / "out"
    process = start(*command, cwd=tmp_path, program=("-c", SLOWED))
    deadline = time.monotonic() + 180
    manifest = folder / "metadata.jsonl"
    while not manifest.exists() or manifest.read_text().count("\n") < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    before = manifest.read_bytes().count(b"\n")
    assert 3 <= before < COUNT
    if stop == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + stop and "Traceback" not in err
        assert f"{before} of {COUNT} images are finished" in err and err.endswith("stopped.\n")
        assert not list(folder.glob(UNFINISHED))
    finish(command, folder, before)
    uninterrupted = call(*command[:-1], tmp_path / "whole")
    assert uninterrupted.record["passes"] == COUNT * PASSES
    for path in folder.glob("*.png"):
        assert Image.open(path).tobytes() == Image.open(tmp_path / "whole" / path.name).tobytes()


def line_cut_off(folder: Path) -> int:
    path = folder / "metadata.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    return 4


def image_half_written(folder: Path) -> int:
    (folder / ".00005.png.part").write_bytes(b"\x89PNG")
    return 5


def image_without_line(folder: Path) -> int:
    (folder / "00005.png").write_bytes((folder / "00000.png").read_bytes())
    return 5


def line_without_image(folder: Path) -> int:
    (folder / "00002.png").unlink()
    return 4


def no_manifest(folder: Path) -> int:
    (folder / "metadata.jsonl").unlink()
    return 0


STATES = [line_cut_off, image_half_written, image_without_line, line_without_image, no_manifest]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_every_state_after_a_crash_resumes(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Callable[[Path], int]
) -> None:
    folder = tmp_path / "out"
    add = RunFolder.add

    def add_five(self: RunFolder, image: StoredImage, timing: dict[str, Any]) -> None:
        add(self, image, timing)
        if self.count() == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add", add_five)
        stopped = call(*command)
    assert stopped.code == 130 and f"5 of {COUNT} images" in stopped.err
    finish(command, folder, state(folder))


def test_finished_run_generates_nothing(command: list[object], tmp_path: Path) -> None:
    first = call(*command).record
    again = finish(command, tmp_path / "out", COUNT).record
    assert again == {**first, "drawn": 0}


def test_resumed_run_keeps_its_random_seed(small_model: Path, tmp_path: Path) -> None:
    command = ["generate", "fox", "-n", 2, "-m", small_model, "-o", tmp_path / "out", "--tree", "none", "--json"]
    first = call(*command).record
    (tmp_path / "out" / "00001.png").unlink()
    again = call(*command).record
    assert again["seed"] == first["seed"] and again["drawn"] == 1


def test_force_restarts_and_keeps_other_files(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = ["generate", "fox", "-m", small_model, "-o", folder, "--tree", "none", "--seed", 1]
    call(*command, "-n", 4)
    (folder / "letter.txt").write_text("mine")
    assert call(*command, "-n", 2).code == 2
    assert call(*command, "-n", 2, "--force").code == 0
    left = {path.name for path in folder.iterdir()}
    assert left == {"00000.png", "00001.png", "letter.txt", "metadata.jsonl", "run.json", "timings.jsonl"}
    assert len(rows(folder)) == 2


def test_stopped_image_is_not_written(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("underdraw.pipeline.Pipeline.decode_images", stop)
    done = call("generate", "fox", "-m", small_model, "-o", tmp_path / "a.png", "--tree", "none")
    assert (done.code, done.out, done.err) == (130, "", "stopped.\n") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["-o", "a.png"], ["-n", 2, "-o", "out"]], ids=["image", "folder"])
def test_sigterm_while_the_model_is_loaded(small_model: Path, tmp_path: Path, words: list[object]) -> None:
    line = ["generate", "fox", "-m", small_model, "--tree", "none", *words]
    process = start(*line, cwd=tmp_path, program=TERMINATED_ON_LOAD)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "") and err.endswith("stopped.\n") and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [("--seed", 4), ("--n", 2), ("--limit", 1), ("-m", "tiny")], ids=lambda pair: pair[0]
)
def test_other_settings_are_refused_before_the_model_is_loaded(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[object, ...]
) -> None:
    """Those that are known without the model; it may have to be downloaded."""
    run = [*command, "--limit", 2]
    assert call(*run).code == 0
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda **_: pytest.fail("the model is loaded"))
    done = call(*run, *change)
    assert done.code == 2 and "holds a run with other settings" in done.err
