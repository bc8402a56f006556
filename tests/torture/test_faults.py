"""Faults: every file operation fails once, processes are killed at random, several work on one folder.

After a restart the result is that of an undisturbed run: byte for byte, but for times.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_checkpoint

from torture.checks import run_cases, run_hostile, snapshot
from torture.forked import FAULTS, KILLED, Faults, fork
from torture.mutations import case_random
from torture.test_damaged_runs import TIMES

KILLS, ROUNDS = 102, 50
COMMANDS = ("generate", "bench", "train samples", "train drafter", "shards")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, prompts, samples, and the undisturbed result of every command."""
    folder = tmp_path_factory.mktemp("faults")
    small_checkpoint.write(folder / "model", side=3)
    (folder / "prompts.txt").write_text("a red fox\na fox\n")
    run_hostile(*command(folder, "train samples", folder / "samples"))
    for name in COMMANDS:
        done = run_hostile(*command(folder, name, folder / name.replace(" ", "-")))
        assert done.code == 0, done
    return folder


def command(base: Path, name: str, out: Path) -> tuple[object, ...]:
    model, prompts = ("-m", base / "model"), ("--prompts", base / "prompts.txt")
    return {
        "generate": ("generate", *model, *prompts, "-o", out, "--seed", 1, "--tree", "none", "--quiet"),
        "shards": (
            *("generate", *model, *prompts, "-o", out, "--seed", 1, "--tree", "none", "--quiet"),
            *("--format", "webdataset", "--shard-size", 2),
        ),
        "bench": ("bench", *model, *prompts, "-o", out, "--seed", 1, "--tree", "chain:depth=2", "--quiet"),
        "train samples": ("train", "samples", *model, *prompts, "--count", 4, "--batch", 2, "-o", out),
        "train drafter": (
            *("train", "drafter", *model, "--samples", base / "samples", "-o", out, "--seconds", 0.01, "--batch", 1),
            *("--held-out", 1, "--layers", 1, "--ffn", 8, "--depth", 2, "--roots", 1, "--evaluate-images", 1),
            *("--markov-dim", 4, "--evaluate-every", 0.005),
        ),
    }[name]


def content(folder: Path, name: str) -> dict[str, Any]:
    """What a folder holds, without what depends on time."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        key = str(path.relative_to(folder))
        if path.suffix == ".jsonl" and path.name != "timings.jsonl":
            rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            found[key] = sorted(str({k: v for k, v in row.items() if k not in TIMES}) for row in rows)
        elif path.suffix in (".png", ".tar", ".safetensors") and name != "train drafter":
            found[key] = path.read_bytes()
        else:  # settings with the machine's memory, summaries with times, weights of a training of so many seconds
            found[key] = path.is_file()
    return found


def check_result(base: Path, name: str, out: Path, what: str) -> None:
    """The folder is that of an undisturbed run, and a drafter in it can be used."""
    ours, theirs = content(out, name), content(base / name.replace(" ", "-"), name)
    assert list(ours) == list(theirs), (what, list(ours), list(theirs))
    assert ours == theirs, (what, [key for key in ours if ours[key] != theirs[key]])
    if name == "train drafter":
        picture = out.parent / "picture.png"
        drawn = ("generate", "fox", "-m", base / "model", "-o", picture, "--seed", 1, "--force", "--quiet")
        assert run_hostile(*drawn, "--drafter", out, "--tree", "chain:depth=2").code == 0, what
        first = picture.read_bytes()
        assert run_hostile(*drawn, "--tree", "none", "--drafter", "forced").code == 0
        assert len(first) > 0


def restart(base: Path, name: str, out: Path, what: str) -> None:
    child = fork(command(base, name, out), out.parent / "restart.log")
    assert child.wait() == 0, (what, child.output())
    check_result(base, name, out, what)


def operations(base: Path, name: str, here: Path) -> list[str]:
    """The file operations of an undisturbed run."""
    here.mkdir(parents=True)
    out, counts = here / "run", here / "counts"
    child = fork(command(base, name, out), here / "log", Faults(out), counts)
    assert child.wait() == 0, child.output()
    return counts.read_text().split("\n")


def check_fault(base: Path, name: str, at: int, fault: str, here: Path) -> str:
    here.mkdir(parents=True)
    out, what = here / "run", f"{name}: operation {at} fails with {fault}"
    child = fork(command(base, name, out), here / "log", Faults(out, at, fault))
    code, output = child.wait(), child.output()
    assert "Traceback" not in output, (what, output)
    if fault == "kill":
        assert code in (KILLED, 0), (what, code, output)
    else:  # some failures do no harm: a temporary file that is gone already
        assert code in (0, 2), (what, code, output)
        errors = [line for line in output.split("\n") if line.startswith("error: ")]
        assert len(errors) == (code == 2), (what, output)
        if out.exists():
            assert not [path for path in snapshot(out) if path.endswith(".part")], (what, "a temporary file is left")
    restart(base, name, out, what)
    shutil.rmtree(here)
    return fault


@pytest.mark.parametrize("name", COMMANDS)
def test_some_file_operations_fail(name: str, base: Path, tmp_path: Path) -> None:
    count = len(operations(base, name, tmp_path / "count"))
    for index, fault in enumerate(FAULTS if name != "train drafter" else FAULTS[:1]):
        check_fault(base, name, case_random(name, fault).randrange(count), fault, tmp_path / str(index))


@pytest.mark.torture
@pytest.mark.parametrize("name", COMMANDS)
def test_every_file_operation_fails(name: str, base: Path, tmp_path: Path) -> None:
    count = len(operations(base, name, tmp_path / "count"))
    cases = [(at, fault) for at in range(count) for fault in FAULTS]
    run_cases(len(cases), lambda index: check_fault(base, name, *cases[index], tmp_path / str(index)))
    print(f"{name}: {count} file operations, {len(cases)} faults")


def check_kill(base: Path, index: int, here: Path) -> bool:
    """Kill a command at a random moment, sometimes twice, then let it finish."""
    rng, name = case_random("kill", index), COMMANDS[index % 3]
    here.mkdir()
    out, killed = here / "run", False
    for _ in range(rng.choice([1, 1, 2])):
        started = time.perf_counter()
        child = fork(command(base, name, out), here / "log")
        time.sleep(rng.uniform(0.0, 0.6))
        child.kill()
        killed |= child.wait() == -9
        assert "Traceback" not in child.output(), (name, time.perf_counter() - started, child.output())
    restart(base, name, out, f"kill {index} of {name}")
    shutil.rmtree(here)
    return killed


@pytest.mark.torture
def test_random_kills(base: Path, tmp_path: Path) -> None:
    killed = run_cases(KILLS, lambda index: check_kill(base, index, tmp_path / str(index)))
    print(f"{KILLS} runs, {sum(killed)} of them killed before their end")


def check_round(base: Path, index: int, here: Path, processes: int) -> list[int]:
    """Several processes start the same command in one folder."""
    name = ("generate", "bench", "train samples")[index % 3]
    here.mkdir()
    out = here / "run"
    children = [fork(command(base, name, out), here / f"log{number}") for number in range(processes)]
    codes = [child.wait() for child in children]
    outputs = [child.output() for child in children]
    assert set(codes) <= {0, 2} and 0 in codes, (name, codes, outputs)
    for code, output in zip(codes, outputs, strict=True):
        assert (code == 2) == ("another process is writing" in output), (name, code, output)
    check_result(base, name, out, f"round {index} of {name}")
    shutil.rmtree(here)
    return codes


def test_two_processes_on_one_folder(base: Path, tmp_path: Path) -> None:
    for index in range(3):
        check_round(base, index, tmp_path / str(index), 2)


@pytest.mark.torture
@pytest.mark.parametrize("processes", [2, 5])
def test_processes_on_one_folder(processes: int, base: Path, tmp_path: Path) -> None:
    check: Callable[[int], Any] = lambda index: check_round(base, index, tmp_path / str(index), processes)  # noqa: E731
    codes = run_cases(ROUNDS, check)
    refused = sum(round_codes.count(2) for round_codes in codes)
    print(f"{ROUNDS} rounds of {processes} processes: {refused} refused, {ROUNDS * processes - refused} done")


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    from underdraw.errors import ConfigError
    from underdraw.io import FolderLock

    folder = tmp_path / "new" / "folder"
    pid = os.fork()
    if pid == 0:
        FolderLock(folder).__enter__()
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    with FolderLock(folder), pytest.raises(ConfigError, match="another process is writing"), FolderLock(folder):
        pass
    (tmp_path / "b" / "x").mkdir(parents=True)
    with FolderLock(tmp_path / "b" / "c" / "d"):
        assert (tmp_path / "b" / "c" / "d").is_dir()
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["x"], "folders that stay empty are removed"
