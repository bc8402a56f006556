"""A run has the same bytes with 1, 2 and 3 workers, in every format, after kills and failures; others can read it."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import call
from PIL import Image
from planned_runs import FORMATS, PROMPTS, SHARD, DrawRun, contents

from underdraw.distributed.local import ThisProcess, WorkerProcesses
from underdraw.distributed.planned_images import DrawnImage, Event, PlannedImage, WorkerOptions, image_seed, plan_images
from underdraw.distributed.worker import ImageWorker
from underdraw.errors import ConfigError
from underdraw.prompts import PromptRow
from underdraw.run_folder import RunFolder
from underdraw.shards import Format, read_shard


@pytest.fixture(scope="module")
def alone(options: WorkerOptions, run_into: DrawRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in every format, drawn by this process, one image at a time."""
    folder = tmp_path_factory.mktemp("alone")
    workers = ThisProcess(ImageWorker.load(replace(options, slots=1)))
    for image_format in FORMATS:
        result = run_into(workers, folder / image_format, image_format)
        assert (result.images, result.drawn, result.failed, result.is_complete) == (60, 60, 0, True)
    return folder


@pytest.fixture(scope="module", params=[1, 2, 3])
def processes(request: pytest.FixtureRequest, options: WorkerOptions) -> Iterator[WorkerProcesses]:
    workers = WorkerProcesses(options, request.param)
    yield workers
    workers.close()


def test_bytes_do_not_depend_on_workers(
    processes: WorkerProcesses, run_into: DrawRun, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a worker is killed in the middle, in the last of three runs."""
    events, draw = 0, processes.draw

    def kill_one(images: Any, tree: str) -> Iterator[Event]:
        nonlocal events
        for event in draw(images, tree):
            events += isinstance(event, DrawnImage)
            if events == 140:
                os.kill(processes.process_ids()[0], signal.SIGKILL)
                events += 1
            yield event

    monkeypatch.setattr(processes, "draw", kill_one)
    for image_format in FORMATS:
        assert run_into(processes, tmp_path / image_format, image_format).drawn == 60
        assert contents(tmp_path / image_format) == contents(alone / image_format)
    assert events == 181


def test_files_of_a_finished_run(alone: Path) -> None:
    assert len(list((alone / "folder").glob("*.png"))) == 60
    names = {"webdataset": "shard-{:06d}.tar", "parquet": "shard-{:06d}.parquet"}
    for image_format, name in names.items():
        files = {path.name for path in (alone / image_format).iterdir()}
        assert files == {*(name.format(number) for number in range(4)), "run.json", "timings.jsonl"}


class Unreliable(ThisProcess):
    """Draws, but some images fail, as if the GPU had been lost while it drew them."""

    failing: frozenset[int] = frozenset()

    def draw(self, images: Any, tree: str) -> Iterator[Event]:
        from underdraw.distributed.planned_images import FailedImage

        for event in super().draw(images, tree):
            if isinstance(event, DrawnImage) and event.image.index in self.failing:
                yield FailedImage(event.image, "RuntimeError: device lost", False)
            else:
                yield event


@pytest.mark.parametrize("image_format", FORMATS)
def test_failed_images_are_listed_and_drawn_by_the_next_start(
    image_format: Format, options: WorkerOptions, run_into: DrawRun, alone: Path, tmp_path: Path
) -> None:
    workers = Unreliable(ImageWorker.load(options))
    workers.failing = frozenset({3, 40, 41})
    result = run_into(workers, tmp_path / "run", image_format)
    assert (result.drawn, result.failed) == (57, 3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "failed.jsonl").read_text().splitlines()]
    assert [(row["index"], row["id"], row["reason"]) for row in rows] == [
        (index, f"p{index}", "RuntimeError: device lost") for index in (3, 40, 41)
    ]
    workers.failing = frozenset({41})
    assert run_into(workers, tmp_path / "run", image_format).failed == 1
    workers.failing = frozenset()
    result = run_into(workers, tmp_path / "run", image_format)
    assert (result.drawn, result.failed) == (1, 0)
    assert contents(tmp_path / "run") == contents(alone / image_format)


@pytest.mark.parametrize("image_format", FORMATS)
def test_full_disk_loses_nothing(
    image_format: Format,
    options: WorkerOptions,
    run_into: DrawRun,
    alone: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full at the 30th file, while an image or a shard is written; the run then goes on."""
    replace_file, count = os.replace, 0

    def full(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count == 30:
            raise OSError(28, "No space left on device", str(target))
        replace_file(source, target)

    workers = ThisProcess(ImageWorker.load(options))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            run_into(workers, tmp_path / "run", image_format)
    workers = ThisProcess(ImageWorker.load(options))
    result = run_into(workers, tmp_path / "run", image_format)
    assert 0 < result.drawn < 60
    assert contents(tmp_path / "run") == contents(alone / image_format)


def test_huggingface_datasets_read_the_folder(alone: Path, tmp_path: Path) -> None:
    import datasets

    data = datasets.load_dataset("imagefolder", data_dir=str(alone / "folder"), cache_dir=str(tmp_path), split="train")
    assert len(data) == 60 and data[7]["prompt"] == "a red fox 7" and data[7]["kind"] == 1
    stored = Image.open(alone / "folder" / "00007.png")
    assert data[7]["image"].tobytes() == stored.tobytes() and data[7]["seed"] == image_seed(7, "p7", 0)


def test_webdataset_reads_the_shards(alone: Path) -> None:
    import webdataset

    urls = [str(path) for path in sorted((alone / "webdataset").glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode("pil"))
    assert [sample["txt"] for sample in samples] == [row.prompt for row in PROMPTS]
    assert samples[20]["json"]["id"] == "p20" and samples[20]["png"].size == (6, 6)


def test_arrow_and_datasets_read_the_parquet_files(alone: Path, tmp_path: Path) -> None:
    import datasets
    import pyarrow.dataset

    # The folder holds run.json, too.
    table = pyarrow.dataset.dataset(alone / "parquet", format="parquet", exclude_invalid_files=True).to_table()
    assert table.num_rows == 60 and table["id"].to_pylist() == [row.id for row in PROMPTS]
    assert table["kind"].to_pylist() == [row.columns["kind"] for row in PROMPTS]
    png = table["image"][30].as_py()["bytes"]
    assert png == (alone / "folder" / "00030.png").read_bytes()
    files = str(alone / "parquet" / "*.parquet")
    data = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path), split="train")
    assert data[30]["image"].tobytes() == Image.open(io.BytesIO(png)).tobytes()


def test_rows_say_how_an_image_was_drawn(alone: Path, options: WorkerOptions) -> None:
    rows = [image.row for path in sorted((alone / "webdataset").glob("*.tar")) for image in read_shard(path)]
    assert [row["index"] for row in rows] == list(range(60)) and len(rows) == 60 > 3 * SHARD
    row = rows[5]
    assert row["seed"] == image_seed(7, "p5", 0) and row["model"] == options.pipeline["model"]
    assert row["settings"]["tree"] == "chain:depth=2" and set(row["versions"]) == {"underdraw", "torch"}
    assert row["revision"].startswith("sha256:") and row["tokens"] == 8 and row["tokens_per_pass"] >= 1


def test_evaluate_and_train_read_all_formats(alone: Path, tiny_model: Path, tmp_path: Path) -> None:
    for image_format in FORMATS[1:]:
        done = call("evaluate", alone / image_format, "--against", alone / "folder", "--json")
        assert done.code == 0, done.err
        assert done.record["exact"] == {"pictures": 60, "identical": 60, "rate": 1.0, "equal_codes": 1.0}
    done = call(
        "train", "samples", "-m", tiny_model, "--images", alone / "parquet", "-o", tmp_path / "s", "--batch", 30
    )
    assert done.code == 0 and "60 samples of 60 texts" in done.out, done.err


def test_seed_follows_from_run_seed_id_and_repeat() -> None:
    few = {(image.id, image.repeat): image.seed for image in plan_images(PROMPTS[:9], 2, 5)}
    many = {(image.id, image.repeat): image.seed for image in plan_images(PROMPTS[::-1], 4, 5)}
    assert few.items() <= many.items() and len(set(many.values())) == 240
    assert image_seed(5, "p1", 0) == few["p1", 0] != image_seed(6, "p1", 0)
    numbered = [PromptRow(str(number), "fox", is_numbered=True) for number in range(3)]
    assert [image.seed for image in plan_images(numbered, 1, 20)] == [20, 21, 22]  # as a call with a list
    assert [image.seed for image in plan_images([PromptRow("a", "fox", seed=9)], 3, 20)] == [9, 10, 11]


def test_second_run_in_a_folder_is_refused(alone: Path) -> None:
    first, second = RunFolder(alone / "folder"), RunFolder(alone / "folder")
    first.lock()
    with pytest.raises(ConfigError, match="another process"):
        second.lock()
    first.close()


def test_drawer_draws_batches_like_a_run(alone: Path, options: WorkerOptions) -> None:
    from underdraw.distributed import Drawer

    drawer = Drawer(**options.pipeline, seed=7, slots=3)
    batch = {"id": [f"p{n}" for n in range(4)], "prompt": [f"a red fox {n}" for n in range(3)] + ["fox " * 200]}
    out = drawer(batch)
    assert [png == (alone / "folder" / f"{n:05d}.png").read_bytes() for n, png in enumerate(out["image"][:3])] == [
        True, True, True,
    ]  # fmt: skip
    assert out["image"][3] is None and "shorten it" in out["error"][3] and out["error"][:3] == [None] * 3
    with pytest.raises(ConfigError, match="column prompt"):
        drawer({"text": ["fox"]})


def test_poisonous_image_is_given_up(options: WorkerOptions) -> None:
    """An image that ends its worker every time is reported, and the others are drawn."""
    images = [PlannedImage(n, str(n), 0, "poison" if n == 3 else f"fox {n}", n) for n in range(8)]
    workers = WorkerProcesses(options, 2, program=(str(Path(__file__).with_name("poisoned_process.py")),))
    try:
        tree = workers.start().tree
        events = [event for event in workers.draw(images, tree) if hasattr(event, "image")]
    finally:
        workers.close()
    failed = [event for event in events if not isinstance(event, DrawnImage)]
    assert [event.image.index for event in failed] == [3] and "ended with code 9" in failed[0].reason
    assert {event.image.index for event in events} == set(range(8))
