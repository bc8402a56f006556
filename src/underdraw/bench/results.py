"""A benchmark's folder: run.json (settings), rows.jsonl (one row per image), cells.jsonl (per-cell values).

A row is on disk before the next image is started, so a stopped run resumes at the first image without a row.
Prompts, repeats and methods can be added to a run later; its model, seed and sampling settings must not change. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from underdraw.errors import ConfigError
from underdraw.io import JsonlStore, atomic_write_json, is_leftover, read_json, remove_unfinished
from underdraw.run_folder import check_same_settings

RUN, ROWS, CELLS = "run.json", "rows.jsonl", "cells.jsonl"


class ImageKey(NamedTuple):
    """Identifies one image of a run."""

    method: str
    temperature: float
    prompt: int
    repeat: int

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> ImageKey:
        return cls(row["method"], float(row["temperature"]), row["prompt"], row["repeat"])


class ResultFolder:
    """Rows and cells of one run. Nothing is written before `start`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info: dict[str, Any] = {}  # the content of run.json: settings, methods, machine, costs
        self.rows: dict[ImageKey, dict[str, Any]] = {}
        self.cells: dict[ImageKey, dict[str, Any]] = {}
        self._row_store = JsonlStore(path / ROWS, ImageKey.from_row, key=ImageKey.from_row)
        self._cell_store = JsonlStore(path / CELLS, ImageKey.from_row, key=ImageKey.from_row)

    @classmethod
    def read(cls, path: Path) -> ResultFolder:
        """Load an existing run."""
        if not (path / RUN).is_file():
            raise ConfigError(f"{path} has no {RUN}; name a folder written by `underdraw bench --out`.")
        folder = cls(path)
        folder._load()
        return folder

    def open(self, settings: Mapping[str, Any], methods: Mapping[str, Mapping[str, str]], *, overwrite: bool) -> None:
        """Resume the run in the folder if its settings are the same, or prepare a new one."""
        if (self.path / RUN).is_file() and not overwrite:
            self._load()
            check_same_settings(self.path, self.info["settings"], settings)
            saved: dict[str, Any] = self.info["methods"]
            shared = [name for name in saved if name in methods]
            check_same_settings(
                self.path,
                {name: _without_description(saved[name]) for name in shared},
                {name: _without_description(methods[name]) for name in shared},
            )
            self.info["methods"] = {**saved, **methods}
            return
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; --out needs a folder.")
        if self.path.exists() and not all(map(is_leftover, self.path.iterdir())) and not overwrite:
            raise ConfigError(
                f"{self.path} is not empty and has no {RUN}; choose a new folder, or use --force to write into it."
            )
        self.info = {"settings": dict(settings), "methods": dict(methods)}

    def start(self, facts: Mapping[str, Any]) -> None:
        """Create the folder and write run.json, extended by `facts` (machine, costs)."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.path)
        self.info.update(facts)
        if not self.rows:
            self._row_store.clear()
            self._cell_store.clear()
        atomic_write_json(self.path / RUN, self.info)

    def append(self, row: Mapping[str, Any], cells: Mapping[str, Any] | None) -> None:
        """Record an image. Cells are written first, so that a row on disk always has its cells."""
        key = ImageKey.from_row(row)
        if cells is not None:
            self._cell_store.append({**key._asdict(), **cells})
            self.cells[key] = dict(cells)
        self._row_store.append(row)
        self.rows[key] = dict(row)

    def _load(self) -> None:
        remove_unfinished(self.path)
        path = self.path / RUN
        self.info = read_json(path, "the settings of a benchmark")
        if not isinstance(self.info, dict) or not all(
            isinstance(self.info.get(key), dict) for key in ("settings", "methods")
        ):
            raise ConfigError(f"{path} is not a benchmark's; choose a new folder, or use --force to start again.")
        self.rows = {ImageKey.from_row(row): row for row in self._row_store.resume()}
        cells = self._cell_store.resume(keep=lambda line: ImageKey.from_row(line) in self.rows)
        self.cells = {ImageKey.from_row(line): line for line in cells}


def _without_description(method: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in method.items() if key != "about"}


def plain_image_name(temperature: float) -> str:
    """File name of the first image of plain autoregression at a temperature; figures draw maps over it."""
    return f"picture-{temperature:g}.png"
