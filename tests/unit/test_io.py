"""Atomic writes, JSON files, JSON Lines stores that survive a crash, packed grids, and optional packages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from underdraw.errors import CheckpointError, ConfigError, UnsupportedError
from underdraw.extras import require_package
from underdraw.io import (
    JsonlStore,
    atomic_write,
    atomic_write_json,
    cache_dir,
    pack_grid,
    read_json,
    remove_unfinished,
    unpack_grid,
)


def test_atomic_write_replaces_the_file_only_on_success(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), atomic_write(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert path.read_bytes() == b"old"
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"image")
    process = os.fork()
    if process == 0:
        with atomic_write(path) as file:
            file.write(b"half")
            file.flush()
            os._exit(0)  # as if killed: no cleanup runs
    os.waitpid(process, 0)
    assert len(list(tmp_path.iterdir())) == 2
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_json_round_trip_creates_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    value = {"name": "Füchse", "values": [1, 2.5, None]}
    atomic_write_json(path, value)
    assert read_json(path, "a record") == value
    assert "Füchse" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("content", [None, "{", ""], ids=["missing", "cut off", "empty"])
def test_unreadable_json_names_file_and_content(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"a\.json cannot be read as a benchmark summary"):
        read_json(path, "a benchmark summary")
    with pytest.raises(CheckpointError):
        read_json(path, "a model configuration", CheckpointError)


def require_index(row: Any) -> None:
    if row["index"] < 0:
        raise ValueError


def test_store_appends_and_reads(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path / "rows.jsonl", require_index)
    assert store.read() == store.resume() == [] and store.count() == 0
    rows = [{"index": i, "prompt": "ein Fuchs über\nzwei Zeilen"} for i in range(3)]
    for number, row in enumerate(rows, start=1):
        store.append(row)
        assert store.count() == number
    assert store.read() == store.resume() == rows
    store.clear()
    assert store.read() == [] and not store.path.exists()


def test_store_drops_a_cut_off_last_line(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path / "rows.jsonl")
    store.append({"index": 0})
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + b'{"index": 1, "pro')
    assert store.read() == [{"index": 0}] and store.count() == 1
    assert store.path.read_bytes() != whole, "reading changes nothing"
    assert store.resume() == [{"index": 0}]
    assert store.path.read_bytes() == whole
    store.append({"index": 1})
    assert store.read() == [{"index": 0}, {"index": 1}]


def test_store_resumes_without_rejected_rows(tmp_path: Path) -> None:
    store = JsonlStore(tmp_path / "rows.jsonl")
    store.rewrite({"index": i} for i in range(4))
    assert store.resume(lambda row: row["index"] % 2 == 0) == [{"index": 0}, {"index": 2}]
    assert store.read() == [{"index": 0}, {"index": 2}]


@pytest.mark.parametrize("line", ["{", "[1]", '{"other": 1}', '{"index": -1}', ""])
def test_store_names_a_damaged_line(tmp_path: Path, line: str) -> None:
    store = JsonlStore(tmp_path / "rows.jsonl", require_index)
    store.path.write_text(f'{{"index": 0}}\n{line}\n{{"index": 2}}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .*rows\.jsonl is damaged"):
        store.read()
    assert store.read(skip_damaged=True) == [{"index": 0}, {"index": 2}]


def test_grid_round_trip() -> None:
    codes = np.random.default_rng(0).integers(-2, 2**31 - 1, (3, 5))
    assert np.array_equal(unpack_grid(pack_grid(codes), "a test"), codes)
    with pytest.raises(ConfigError, match="the codes in a test are damaged"):
        unpack_grid({**pack_grid(codes), "rows": 4}, "a test")


def test_cache_dir_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDERDRAW_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("UNDERDRAW_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "underdraw"


def test_missing_package_names_the_extra() -> None:
    assert require_package("json", "bench").loads("1") == 1
    message = r"figures needs the package no_such; install it with: pip install 'underdraw\[bench\]'"
    with pytest.raises(UnsupportedError, match=message):
        require_package("no_such.module", "bench", "figures")
