"""A folder of generated images that can be resumed: run.json holds the settings, manifest.jsonl one line per image.

An image file is complete before its line is appended, and the line is on disk before the next image is started. So a
run that was stopped at any moment, by Ctrl-C or a crash, continues with the first image that has no line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from underdraw import __version__
from underdraw.errors import ConfigError
from underdraw.io import JsonlStore, atomic_write_json, is_leftover, read_json, remove_unfinished

SETTINGS_FILE, MANIFEST_FILE = "run.json", "manifest.jsonl"


class RunFolder:
    """The state of one folder. `rows` holds the lines of finished images by their index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[int, dict[str, Any]] = {}
        self._manifest = JsonlStore(folder / MANIFEST_FILE, validate_row, key=lambda row: row["index"])
        self._settings: dict[str, Any] = {}
        self._is_started = False

    def saved_settings(self) -> dict[str, Any] | None:
        """The settings of the run in the folder, None without a run; an error if the folder holds something else."""
        path = self.folder / SETTINGS_FILE
        if not path.exists():
            if self.folder.exists() and not all(map(is_leftover, self.folder.iterdir())):
                raise ConfigError(
                    f"{self.folder} is not empty and has no {SETTINGS_FILE}; choose a new folder, or add --force to "
                    "write into it."
                )
            return None
        try:
            content = read_json(path, "the settings of a run")
        except ConfigError as error:
            raise ConfigError(f"{error} Choose a new folder, or add --force to start again.") from None
        settings = content.get("settings") if isinstance(content, dict) else None
        if not isinstance(settings, dict):
            raise ConfigError(f"{path} has no settings; choose a new folder, or add --force to start again.")
        return settings

    def open(self, settings: Mapping[str, Any], *, restart: bool) -> None:
        """Resume the run in the folder if it has the same settings. Nothing is written before `start`.

        With `restart`, `start` deletes that run and its images instead.
        """
        self._settings = dict(settings)
        saved = None if restart else self.saved_settings()
        if saved is None:
            return
        changed = [key for key in {**saved, **settings} if saved.get(key) != settings.get(key)]
        if changed:
            details = ", ".join(f"{key} {saved.get(key)!r}, not {settings.get(key)!r}" for key in changed[:3])
            raise ConfigError(
                f"{self.folder} holds a run with other settings ({details}); choose a new folder, or add --force to "
                "start again."
            )
        remove_unfinished(self.folder)
        rows = self._manifest.resume(keep=lambda row: (self.folder / row["file"]).is_file())
        self.rows = {row["index"]: row for row in rows}
        self._is_started = True

    def start(self) -> None:
        """Create the folder and its run.json, unless the run was resumed."""
        if self._is_started:
            return
        remove_unfinished(self.folder)
        if (self.folder / SETTINGS_FILE).exists():
            for row in self._manifest.read(skip_damaged=True):
                (self.folder / row["file"]).unlink(missing_ok=True)
        self._manifest.clear()
        atomic_write_json(self.folder / SETTINGS_FILE, {"underdraw": __version__, "settings": self._settings})
        self._is_started = True

    def append(self, row: Mapping[str, Any]) -> None:
        """Record a finished image; `row` needs its index and the name of its file in the folder."""
        self._manifest.append(row)
        self.rows[row["index"]] = dict(row)

    def count(self) -> int:
        """Number of images recorded on disk."""
        return self._manifest.count()


def validate_row(row: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError unless the row has an index and a plain file name."""
    if not isinstance(row["index"], int) or not isinstance(row["file"], str) or Path(row["file"]).name != row["file"]:
        raise ValueError("a line needs a whole number as index and a file name without a folder")
