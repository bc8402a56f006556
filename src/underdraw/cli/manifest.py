"""A folder of pictures that remembers what is in it: run.json says what was asked for, manifest.jsonl what is drawn.

A picture takes its name before its line is appended, and a line is on disk before the next picture is begun. So a run
that was stopped at any moment, by Ctrl-C or by force, goes on with the first picture that has no line. Knows no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from underdraw import __version__
from underdraw.errors import ConfigError
from underdraw.io import UNFINISHED, atomic_write

RUN, LINES = "run.json", "manifest.jsonl"


class Manifest:
    """The record of one folder. `rows` are the pictures that are drawn, by their number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[int, dict[str, Any]] = {}
        self._asked: dict[str, Any] = {}
        self._begun = False

    def settings(self) -> dict[str, Any] | None:
        """What the folder's run was asked for; None if there is no run. Refuses a folder that holds something else."""
        path = self.folder / RUN
        if not path.exists():
            if self.folder.exists() and any(self.folder.iterdir()):
                raise ConfigError(
                    f"{self.folder} is not empty and holds no {RUN}; give a new folder, or --force to write into it."
                )
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}); give a new folder, or --force to start again."
            ) from None
        if not isinstance(known, dict):
            raise ConfigError(f"{path} holds no settings; give a new folder, or --force to start again.")
        return known

    def open(self, settings: Mapping[str, Any], how: Literal["resume", "anew"]) -> None:
        """Go on with the run that is there if it was asked for the same. Nothing is written before the first picture.

        `anew` forgets that run instead, and deletes its pictures.
        """
        self._asked = dict(settings)
        known = self.settings() if how == "resume" else None
        if known is None:
            return
        other = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
        if other:
            told = ", ".join(f"{key} {known.get(key)!r}, not {settings.get(key)!r}" for key in other[:3])
            raise ConfigError(
                f"{self.folder} holds a run with other settings ({told}); give a new folder, or --force to start again."
            )
        self._read()
        self._begun = True

    def begin(self) -> None:
        """Make the folder ready for the first picture."""
        if self._begun:
            return
        if (self.folder / RUN).exists():
            self._read(strict=False)
            for row in self.rows.values():
                (self.folder / row["file"]).unlink(missing_ok=True)
        self.rows = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / LINES).unlink(missing_ok=True)
        about = {"underdraw": __version__, "settings": self._asked}
        with atomic_write(self.folder / RUN) as file:
            file.write((json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode())
        self._begun = True

    def count(self) -> int:
        """Pictures that are noted on disk, whatever moment this is asked at."""
        path = self.folder / LINES
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def append(self, row: Mapping[str, Any]) -> None:
        """Note a picture that has taken its name."""
        with open(self.folder / LINES, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["index"]] = dict(row)

    def _read(self, *, strict: bool = True) -> None:
        """Read the lines; drop a last one that was cut off, and those whose picture is gone."""
        for part in self.folder.glob(UNFINISHED):  # of a picture that was being written
            part.unlink()
        path = self.folder / LINES
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        kept = []
        for number, line in enumerate(lines[:-1], start=1):  # whatever stands behind the last line's end was cut off
            row = _row(line)
            if row is None and strict:
                raise ConfigError(f"line {number} of {path} is damaged; mend it, or give --force to start again.")
            if row is not None and (self.folder / row["file"]).is_file():
                self.rows[row["index"]] = row
                kept.append(line + b"\n")
        if len(kept) < len(lines) - 1 or lines[-1]:
            with atomic_write(path) as file:
                file.write(b"".join(kept))


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    fits = isinstance(row, dict) and isinstance(row.get("index"), int) and isinstance(row.get("file"), str)
    return row if fits and Path(row["file"]).name == row["file"] else None
