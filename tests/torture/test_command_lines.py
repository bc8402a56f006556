"""Command lines from a grammar of options with hostile values: never a traceback, and no file is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_checkpoint

from torture.checks import bounded_memory, run_cases, run_hostile, snapshot
from torture.grammar import COMMANDS, NEWER, Grammar, make_line
from torture.mutations import SEED, case_random
from underdraw.metrics.networks import WEIGHTS

CASES, CI_CASES = 420, 30
NEWER_CASES, NEWER_CI_CASES = 440, 11


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint.write(tmp_path_factory.mktemp("lines") / "model", side=3)


def prepare(here: Path, model: Path) -> None:
    """Files of every kind that the grammar names."""
    here.mkdir()
    (here / "model").symlink_to(model)
    (here / "folder").mkdir()
    for name in ("photo.png", "photo.jpg", "notes.txt", "folder/old.txt"):
        (here / name).write_text("precious")
    (here / "prompts.txt").write_text("a red fox\na fox\n", encoding="utf-8")
    (here / "prompts.tsv").write_text("Prompt\tCategory\n")
    (here / "binary.txt").write_bytes(bytes(range(256)))
    (here / "deep.json").write_text("[" * 5000 + "]" * 5000)
    with (here / "huge.txt").open("wb") as file:
        file.truncate(2**31)  # sparse
    for name in ("fifo", "fifo.txt"):
        os.mkfifo(here / name)
    (here / "loop").symlink_to("loop")
    (here / "dangling.png").symlink_to("nowhere.png")
    (here / "run").mkdir()
    (here / "run" / "00000.png").write_text("precious")


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each format, one that is cut off, and prompt files of every kind, good and bad."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("runs")
    rows: list[dict[str, Any]] = [{"id": "a", "prompt": "a red fox"}, {"id": "b", "prompt": "fox"}]
    write_prompts(folder, rows)
    parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "size": {"w": [1]}} for row in rows]), folder / "rows.parquet"
    )
    base = ("generate", "-m", model, "--tree", "none", "--seed", 1, "--quiet", "--prompts", folder / "rows.jsonl")
    for name, format in (("pictures", "folder"), ("tar", "webdataset"), ("table", "parquet")):
        assert run_hostile(*base, "-o", folder / name, "--format", format).code == 0
    shutil.copytree(folder / "tar", folder / "cut")
    for path in (folder / "cut" / "shard-000000.tar", folder / "cut.parquet"):
        path.write_bytes((folder / "rows.parquet" if path.suffix == ".parquet" else path).read_bytes()[:900])
    (folder / "00000.png").write_bytes((folder / "pictures" / "00000.png").read_bytes())
    (folder / "empty.png").touch()
    (folder / "weights" / WEIGHTS["clip"].name).mkdir(parents=True)
    for key in ("inception", "hps", "aesthetic"):
        (folder / "weights" / WEIGHTS[key].name).write_bytes(b"half a file")
    header = bytes.fromhex("89504e470d0a1a0a0000000d49484452 0001869f0001869f 0802000000")
    (folder / "bomb.png").write_bytes(header)  # 99,999 x 99,999 pixels
    return folder


def write_prompts(folder: Path, rows: list[dict[str, Any]]) -> None:
    seeds = [{"prompt": "fox", "seed": seed} for seed in (2**62 - 1, -1, 2**64, 1.5, "x", True)]
    nested = [{**rows[0], "a": {"b": [1, {"c": None}]}, "index": 5, "file_name": "../x.png", "settings": [], "": 1}]
    paths = [{"id": name, "prompt": "fox"} for name in ("../../x", "/etc/passwd", "a\n.png", "e\u0301", "\u00e9", "")]
    lines = {"rows": rows, "seeds": seeds, "same": [*rows, *rows], "paths": paths, "nested": nested, "empty": []}
    for name, values in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    (folder / "rows.csv").write_text('id,prompt,seed\na,"a red\nfox",1\nb,fox,\n')
    (folder / "cut.csv").write_text('id,prompt\na,"a red fox\n')
    (folder / "wide.csv").write_text("prompt," + ",".join(map(str, range(5000))) + "\nfox" + "," * 5000 + "\n")


def check_case(index: int, make: Any, here: Path, monkeypatch: pytest.MonkeyPatch, commands: Grammar = COMMANDS) -> int:
    """One line; `make` writes the files that it may name into the folder `here`."""
    rng = case_random("line" if commands is COMMANDS else "newer line", index)
    make(here)
    monkeypatch.chdir(here)
    line = make_line(rng, list(commands)[index % len(commands)], commands)
    if "huge.txt" not in line:  # 2 GiB are not hashed every time
        (here / "huge.txt").unlink()
    before = snapshot(here) if "huge.txt" not in line else {}
    what = f"case {index} of seed {SEED}: underdraw {line}"
    done = run_hostile(*line, context=what)
    if before:
        after = snapshot(here)
        lost = {name for name, content in before.items() if after.get(name) != content}
        assert not lost or "--force" in line or "-f" in line, f"{what}: changed {lost}"
        assert done.code == 0 or set(after) <= set(before) or "--force" in line, (
            f"{what}: left {set(after) - set(before)}"
        )
    shutil.rmtree(here)
    return done.code


def test_some_command_lines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cases(
        CI_CASES,
        lambda index: check_case(index, lambda here: prepare(here, model), tmp_path / str(index), monkeypatch),
    )


@pytest.mark.torture
def test_command_lines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bounded_memory():
        codes = run_cases(
            CASES,
            lambda index: check_case(index, lambda here: prepare(here, model), tmp_path / str(index), monkeypatch),
        )
    print(f"{CASES} command lines of seed {SEED}: {codes.count(2)} refused, {codes.count(0)} done")


def check_newer(count: int, model: Path, runs: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lines of the commands that serve, verify, plan and measure."""
    from underdraw.serving import server

    started = server.DrainingServer.startup

    async def startup(self: server.DrainingServer, sockets: Any = None) -> None:
        await started(self, sockets)
        self.handle_exit(15, None)  # a server that accepts its options ends as by SIGTERM

    def make(folder: Path) -> None:
        prepare(folder, model)
        shutil.copytree(runs, folder, dirs_exist_ok=True)

    monkeypatch.setattr(server.DrainingServer, "startup", startup)
    return run_cases(count, lambda index: check_case(index, make, here / str(index), monkeypatch, NEWER))


def test_some_newer_command_lines(model: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_newer(NEWER_CI_CASES, model, runs, tmp_path, monkeypatch)


@pytest.mark.torture
def test_newer_command_lines(model: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bounded_memory():
        codes = check_newer(NEWER_CASES, model, runs, tmp_path, monkeypatch)
    print(f"{NEWER_CASES} newer command lines of seed {SEED}: {codes.count(2)} refused, {codes.count(0)} done")
