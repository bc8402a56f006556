"""`underdraw generate --workers`, its ranks and `underdraw verify` as commands: killed at any moment and resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import call, start
from planned_runs import FORMATS, contents

from underdraw.distributed.ranks import current_rank, local_rank
from underdraw.run_folder import Rank
from underdraw.shards import Format

COUNT = 40


@pytest.fixture(scope="module")
def command(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"p{number}", "prompt": f"a blue fox {number}", "topic": "foxes"} for number in range(COUNT)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ["-m", tiny_model, "--drafter", "jacobi", "--tree", "chain:depth=2", "--device", "cpu"]
    return ["generate", "--prompts", prompts, *model, "--seed", 3, "--shard-size", 10, "--json"]


@pytest.fixture(scope="module")
def whole(command: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run in every format."""
    folder = tmp_path_factory.mktemp("whole")
    for image_format in FORMATS:
        done = call(*command, "-o", folder / image_format, "--format", image_format)
        assert done.code == 0 and done.record["drawn"] == COUNT, done.err
    return folder


def children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def kill_once(command: list[object], folder: Path, generator: random.Random) -> bool:
    """Start the command and kill its driver or a worker at a random moment; whether it ended by itself, finished."""
    process = start(*command, "-o", folder, "--workers", 2, "--batch", 2, cwd=folder.parent)
    workers: list[int] = []
    deadline = time.monotonic() + generator.uniform(1.0, 8.0)
    while time.monotonic() < deadline and process.poll() is None:
        workers = children(process.pid) or workers
        time.sleep(0.05)
    if process.poll() is None and workers and generator.random() < 0.5:
        os.kill(generator.choice(workers), signal.SIGKILL)  # the driver replaces it
        process.communicate(timeout=180)
    elif process.poll() is None:
        process.kill()
        process.communicate(timeout=60)
        end = time.monotonic() + 60
        while any(map(is_running, workers)):  # they notice that nobody listens
            assert time.monotonic() < end, "a worker outlived its driver"
            time.sleep(0.05)
    return process.returncode == 0


def check_kills(command: list[object], whole: Path, folder: Path, image_format: Format, kills: int) -> None:
    """Kill a run several times, a new one whenever it is finished; each must end with the bytes of `whole`."""
    generator, number = random.Random(f"{image_format} {kills}"), 0
    arguments = [*command, "--format", image_format]
    for _ in range(kills):
        if kill_once(arguments, folder / str(number), generator):
            assert contents(folder / str(number)) == contents(whole / image_format)
            number += 1
    done = call(*arguments, "-o", folder / str(number))
    assert done.code == 0, done.err
    assert contents(folder / str(number)) == contents(whole / image_format)


def test_killed_run_resumes(command: list[object], whole: Path, tmp_path: Path) -> None:
    check_kills(command, whole, tmp_path, "webdataset", 2)


@pytest.mark.full
@pytest.mark.parametrize("image_format", FORMATS)
def test_killed_run_resumes_every_time(
    image_format: Format, command: list[object], whole: Path, tmp_path: Path
) -> None:
    """Ten kills for each format, thirty in all."""
    check_kills(command, whole, tmp_path, image_format, 10)


def test_ranks_share_a_run(command: list[object], whole: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "underdraw", *map(str, command), "-o", "run", "--format", "parquet"]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"}
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True))
    outputs = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert [json.loads(out.splitlines()[-1])["drawn"] for out, _ in outputs] == [COUNT // 2, COUNT // 2]
    assert contents(tmp_path / "run") == contents(whole / "parquet")


def test_rank_of_the_launchers() -> None:
    assert current_rank({}) == Rank(0, 1)
    assert current_rank({"RANK": "3", "WORLD_SIZE": "8"}) == Rank(3, 8)
    assert current_rank({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}) == Rank(5, 6)
    assert current_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}) == Rank(0, 1)  # a batch script, not srun
    assert local_rank({"SLURM_LOCALID": "2"}) == 2 and local_rank({}) == 0
    assert [index for index in range(7) if Rank(1, 3).draws(index)] == [1, 4]


def test_verify_draws_images_again(whole: Path, tmp_path: Path) -> None:
    for image_format in FORMATS:
        done = call("verify", whole / image_format, "--sample", 6, "--batch", 4, "--json")
        assert done.code == 0 and (done.record["drawn"], done.record["identical"]) == (6, 6), done.err
    assert "40 of 40 images again, 40 identical" in call("verify", whole / "folder", "--sample", 0, "--plain").out
    done = call("verify", tmp_path)
    assert done.code == 2 and "holds no run" in done.err


def test_verify_finds_a_changed_image(command: list[object], whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert call(*command, "--limit", 5, "-o", folder).code == 0
    (folder / "00002.png").write_bytes((folder / "00001.png").read_bytes())
    done = call("verify", folder, "--sample", 0, "--json")
    assert done.code == 1 and done.record["different"] == [2]
    assert "different: 2" in call("verify", folder, "--sample", 0).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 0", "0 should be greater than or equal to 1"),
        ("--workers 2 --ray auto", "exclude each other"),
        ("--actors 2", "add --ray auto"),
        ("--ray auto --actors 3:1", "COUNT or MIN:MAX"),
        ("--ray auto --gpus-per-actor -1", "use 0 to 64"),
        ("--shard-size 0", "0 should be greater than or equal to 1"),
        ("--format webdataset --sheet s.jpg", "--format folder"),
    ],
)
def test_bad_options(words: str, message: str, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = call("generate", "fox", "-n", 2, "-m", tiny_model, "-o", folder, *words.split())
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1 and not folder.exists()
    assert call("generate", "fox", "--workers", 2, "-m", tiny_model).code == 2
