"""The folder of a benchmark: run.json says what is measured, rows.jsonl what was, cells.jsonl what happened where.

A row is on disk before the next picture is begun, so a run that was stopped at any moment goes on with the first
picture that has no row. More prompts, repeats or methods may be added to a run later; its model, seeds and settings
may not change. Knows no model and no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from underdraw.errors import ConfigError
from underdraw.io import UNFINISHED, atomic_write

RUN, ROWS, CELLS = "run.json", "rows.jsonl", "cells.jsonl"


class Key(NamedTuple):
    """Which picture of a run: drawn by which method, at which temperature, for which prompt, for which time."""

    method: str
    temperature: float
    prompt: int
    repeat: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        return cls(row["method"], float(row["temperature"]), row["prompt"], row["repeat"])


class Store:
    """One run's folder. Nothing is written before `begin`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about: dict[str, Any] = {}
        self.rows: dict[Key, dict[str, Any]] = {}
        self.cells: dict[Key, dict[str, Any]] = {}

    @classmethod
    def read(cls, folder: Path) -> Store:
        """A run that is there."""
        store = cls(folder)
        if not (folder / RUN).is_file():
            raise ConfigError(f"{folder} holds no {RUN}; name the folder that `underdraw bench --out` has written.")
        store._load()
        return store

    def open(self, settings: Mapping[str, Any], methods: Mapping[str, Any], *, anew: bool) -> None:
        """Go on with the run that is there if it is the same one; `anew` forgets it."""
        if (self.folder / RUN).is_file() and not anew:
            self._load()
            self._same(self.about["settings"], settings)
            known = self.about["methods"]
            self._same({name: known[name] for name in known if name in methods}, methods, partly=True)
            self.about["methods"] = {**known, **methods}
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is a file; a run needs a folder.")
        if self.folder.exists() and any(self.folder.iterdir()) and not anew:
            raise ConfigError(
                f"{self.folder} is not empty and holds no {RUN}; give a new folder, or --force to write into it."
            )
        self.about = {"settings": dict(settings), "methods": dict(methods)}

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Make the folder ready: write what is measured, with `facts` that are only known now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.about.update(facts)
        if not self.rows:
            for name in (ROWS, CELLS):
                (self.folder / name).unlink(missing_ok=True)
        write_json(self.folder / RUN, self.about)

    def append(self, row: Mapping[str, Any], cells: Mapping[str, Any] | None) -> None:
        """Note a picture; its row comes last, so that a row never lacks its cells."""
        key = Key.of(row)
        if cells is not None:
            self._add(CELLS, {**key._asdict(), **cells})
            self.cells[key] = dict(cells)
        self._add(ROWS, row)
        self.rows[key] = dict(row)

    def _add(self, name: str, line: Mapping[str, Any]) -> None:
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _same(self, known: Mapping[str, Any], asked: Mapping[str, Any], *, partly: bool = False) -> None:
        keys = known if partly else {**known, **asked}
        other = [key for key in keys if known.get(key) != asked.get(key)]
        if other:
            told = ", ".join(f"{key} {known.get(key)!r}, not {asked.get(key)!r}" for key in other[:2])
            raise ConfigError(
                f"{self.folder} holds a run with other settings ({told}); give a new folder, or --force to start again."
            )

    def _load(self) -> None:
        for part in self.folder.glob(UNFINISHED):
            part.unlink()
        path = self.folder / RUN
        try:
            self.about = json.loads(path.read_text(encoding="utf-8"))
            complete = isinstance(self.about["settings"], dict) and isinstance(self.about["methods"], dict)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); give a new folder, or --force to start again."
            ) from None
        if not complete:
            raise ConfigError(f"{path} is not what a benchmark writes; give a new folder, or --force to start again.")
        self.rows = {Key.of(row): row for row in self._lines(ROWS)}
        self.cells = {Key.of(line): line for line in self._lines(CELLS)}

    def _lines(self, name: str) -> Iterable[dict[str, Any]]:
        """The whole lines of a file; a last one that was cut off is taken away."""
        path = self.folder / name
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        found = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                row = json.loads(line)
                Key.of(row)
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"line {number} of {path} is damaged; delete that line and run again.") from None
            found.append(row)
        if lines[-1]:
            with atomic_write(path) as file:
                file.write(b"".join(line + b"\n" for line in lines[:-1]))
        return found


def picture_name(temperature: float) -> str:
    """The file of the first picture that plain autoregression has drawn at a temperature."""
    return f"picture-{temperature:g}.png"


def write_json(path: Path, value: Any) -> None:
    """A JSON file that appears whole or not at all, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); make it again.") from None
