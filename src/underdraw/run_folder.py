"""A run of many images that can be stopped at any moment and resumed, in a folder that other tools can read.

`run.json` holds the settings, `timings.jsonl` what differs from run to run, `failed.jsonl` prompts that failed. The
images are PNG files with `metadata.jsonl`, or shards (see `shards`). An image is on disk before it counts as drawn; an
unfinished shard waits as single files in `.unfinished`. Except `timings.jsonl`, a finished run has the same bytes
however often it was stopped, and with any number of processes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw import __version__
from underdraw.errors import ConfigError
from underdraw.image_store import ImageFiles, ImageStore, RunStorage, Shards
from underdraw.io import (
    FolderLock,
    JsonlStore,
    atomic_write,
    atomic_write_json,
    is_leftover,
    open_regular,
    read_json,
    remove_unfinished,
)
from underdraw.shards import StoredImage

SETTINGS_FILE, TIMINGS_FILE, FAILED_FILE = "run.json", "timings.jsonl", "failed.jsonl"
START_SECONDS = 900.0  # how long ranks wait until rank 0 has loaded the model and written run.json
FINISH_SECONDS = 120.0  # how long a rank waits for another one that is finishing the run


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of `world` cooperating processes this is; each draws every `world`-th image."""

    rank: int = 0
    world: int = 1

    def draws(self, index: int) -> bool:
        return index % self.world == self.rank

    def lock_folder(self, folder: Path) -> Path:
        """What to lock, so that the ranks of a launcher share `folder` with each other and with nobody else."""
        return folder if self.rank == 0 else folder / f".rank{self.rank:05d}"


ALONE = Rank()


class RunFolder:
    """One run. Between `open` and `close` no other process writes into the folder, except for the other ranks."""

    def __init__(self, folder: Path, rank: Rank = ALONE) -> None:
        self.folder, self.rank = folder, rank
        self._suffix = "" if self.rank.world == 1 else f"-rank{self.rank.rank:05d}"
        self._locks = ExitStack()
        self._settings: dict[str, Any] = {}
        self._failed: dict[int, dict[str, Any]] = {}  # by index
        self._saved: dict[str, Any] | None = None  # content of run.json
        self._store: ImageStore

    def lock(self) -> None:
        """Refuse to share the folder with another run. The operating system drops the lock of a dead process."""
        self._locks.enter_context(FolderLock(self.rank.lock_folder(self.folder), "a run of images"))

    def close(self) -> None:
        self._locks.close()

    def saved(self) -> dict[str, Any] | None:
        """The content of run.json, None without a run; an error if the folder holds something else."""
        path = self.folder / SETTINGS_FILE
        if not path.exists():
            others = list(self.folder.iterdir()) if self.folder.is_dir() else []
            if any(not is_leftover(entry) and not entry.name.startswith(".rank") for entry in others):
                raise ConfigError(
                    f"{self.folder} is not empty and has no {SETTINGS_FILE}; choose a new folder, or add --force to "
                    "write into it."
                )
            return None
        try:
            content = read_json(path, "the settings of a run")
        except ConfigError as error:
            raise ConfigError(f"{error} Choose a new folder, or add --force to start again.") from None
        is_run = isinstance(content, dict) and isinstance(content.get("settings"), dict)
        if not is_run or not isinstance(content.get("tree", ""), str):
            raise ConfigError(f"{path} has no settings; choose a new folder, or add --force to start again.")
        return content

    def open(self, settings: Mapping[str, Any], storage: RunStorage, *, restart: bool = False) -> None:
        """Resume the run in the folder if it has the same settings. Nothing is written before `start`.

        With `restart`, `start` deletes that run and its images instead.
        """
        self._settings, self._storage = dict(settings), storage
        self._store = self._make_store(storage)
        saved = None if restart else self._wait_for_settings()
        if saved is None:
            return
        check_same_settings(self.folder, saved["settings"], settings)
        self._resume()
        self._saved = saved

    def _wait_for_settings(self) -> dict[str, Any] | None:
        """`saved`; ranks other than 0 wait until rank 0 has started the run."""
        deadline = time.monotonic() + START_SECONDS
        while (saved := self.saved()) is None and self.rank.rank > 0:
            if time.monotonic() > deadline:
                raise ConfigError(f"rank 0 did not start the run in {self.folder}; look at its log.")
            time.sleep(0.1)
        return saved

    def _resume(self) -> None:
        if self.rank.rank == 0:
            remove_unfinished(self.folder)
        self._store.resume()
        for path in sorted(self.folder.glob("failed*.jsonl")):
            self._failed |= {row["index"]: row for row in JsonlStore(path, _validate_failed).read()}
        # What failed because of the prompt fails again; anything else is tried again.
        again = [index for index, row in self._failed.items() if not row["permanent"] and self.rank.draws(index)]
        for index in again:
            del self._failed[index]
        for index in again:
            self._store.reopen(index, self._failed)
        if again:
            rows = [row for row in self.failed() if self.rank.draws(row["index"])]
            self._write_failed(self.folder / f"failed{self._suffix}.jsonl", rows)

    @property
    def is_started(self) -> bool:
        """Whether the folder holds this run already."""
        return self._saved is not None

    def start(self, details: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Create the folder and its run.json, unless the run was resumed; returns the content of run.json.

        `details` are stored with the settings, but not compared when the run is resumed.
        """
        if self._saved is None:
            if (self.folder / SETTINGS_FILE).exists():
                self._delete()
            remove_unfinished(self.folder)  # of a process that was killed while it wrote the first run.json
            self._saved = {"underdraw": __version__, "settings": self._settings, **(details or {})}
            atomic_write_json(self.folder / SETTINGS_FILE, self._saved)
        return self._saved

    def _delete(self) -> None:
        """Delete the run in the folder and keep files that are not part of it."""
        remove_unfinished(self.folder)
        for store in (ImageFiles(self.folder), Shards(self.folder, RunStorage(0))):
            store.delete()
        for pattern in ("timings*.jsonl", "failed*.jsonl", SETTINGS_FILE):
            for path in self.folder.glob(pattern):
                path.unlink()

    def is_done(self, index: int) -> bool:
        """Whether an image is on disk, or cannot be drawn because of its prompt."""
        return index in self._failed or self._store.has(index)

    def add(self, image: StoredImage, timing: Mapping[str, Any]) -> None:
        """Store a drawn image; when this returns, it is on disk."""
        JsonlStore(self.folder / f"timings{self._suffix}.jsonl").append({"index": image.index, **timing})
        self._store.add(image)

    def fail(self, row: Mapping[str, Any]) -> None:
        """Record an image that could not be drawn: its index, prompt, `reason`, and whether that is `permanent`."""
        self._failed[row["index"]] = dict(row)
        JsonlStore(self.folder / f"failed{self._suffix}.jsonl").append(row)
        self._store.fail(row["index"])

    def failed(self) -> list[dict[str, Any]]:
        """The images that could not be drawn, by index."""
        return [self._failed[index] for index in sorted(self._failed)]

    def count(self) -> int:
        """Number of images that need no more work, read from the disk: Ctrl-C may come between writing and noting."""
        self._store.resume()
        return sum(self.is_done(index) for index in range(self._storage.images))

    def finish(self) -> bool:
        """Put everything into its final order; False if other ranks are still drawing."""
        if self.rank.world == 1:
            self._finish()
            return True
        with self._finish_lock():  # so that the last two ranks do not finish the run at once
            if not self._are_all_ranks_done():
                return False
            self._finish()
        for path in self.folder.glob(".rank*"):
            with suppress(OSError):
                path.rmdir()
        return True

    def _finish(self) -> None:
        self._store.finish()
        for path in self.folder.glob("failed-*.jsonl"):
            path.unlink()
        self._write_failed(self.folder / FAILED_FILE, self.failed())
        self._merge_timings()

    @contextmanager
    def _finish_lock(self) -> Iterator[None]:
        """A lock that ranks hold for moments only, so it is worth waiting for."""
        deadline = time.monotonic() + FINISH_SECONDS
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(FolderLock(self.folder / ".finish", "the end of a run"))
                    break
                except ConfigError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            yield

    def _are_all_ranks_done(self) -> bool:
        self._store.resume()
        for path in self.folder.glob("failed*.jsonl"):
            self._failed |= {row["index"]: row for row in JsonlStore(path, _validate_failed).read()}
        return all(map(self.is_done, range(self._storage.images)))

    @staticmethod
    def _write_failed(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace a list of failed images; without any there is no file."""
        if rows:
            JsonlStore(path).rewrite(rows)
        else:
            path.unlink(missing_ok=True)

    def _merge_timings(self) -> None:
        """One file of timings instead of one per rank."""
        paths = sorted(self.folder.glob("timings-*.jsonl"))
        if not paths:
            return
        with atomic_write(self.folder / TIMINGS_FILE) as file:
            for path in sorted(self.folder.glob("timings*.jsonl")):
                with open_regular(path, "timings") as source:
                    shutil.copyfileobj(source, file)
        for path in paths:
            path.unlink()

    @property
    def images_planned(self) -> int:
        """Number of images of the whole run."""
        return self._storage.images

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of all images."""
        return self._store.rows()

    def images(self) -> Iterator[StoredImage]:
        """All images, in the order of their indices once the run is finished."""
        return self._store.images()

    def seconds(self) -> tuple[float, float | None]:
        """Seconds that the images took, and those of plain decoding if it was compared."""
        seconds, plain, compared = 0.0, 0.0, False
        for path in self.folder.glob("timings*.jsonl"):
            for row in JsonlStore(path, _validate_timing).read(skip_damaged=True):
                seconds += row["seconds"]
                if "plain_seconds" in row:
                    compared, plain = True, plain + row["plain_seconds"]
        return seconds, plain if compared else None

    def _make_store(self, storage: RunStorage) -> ImageStore:
        if storage.format == "folder":
            return ImageFiles(self.folder, f"metadata{self._suffix}.jsonl")
        return Shards(self.folder, storage)


def check_same_settings(folder: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise unless a run that is to be resumed has the settings that it was started with."""
    changed = [key for key in {**saved, **settings} if saved.get(key) != settings.get(key)]
    if changed:
        details = ", ".join(f"{key} {saved.get(key)!r}, not {settings.get(key)!r}" for key in changed[:3])
        raise ConfigError(
            f"{folder} holds a run with other settings ({details}); choose a new folder, or add --force to start again."
        )


def _validate_timing(row: Mapping[str, Any]) -> None:
    """Raise unless the row has seconds; a damaged one is left out, since nothing depends on it."""
    if not all(type(row.get(key, 0.0)) in (int, float) for key in ("seconds", "plain_seconds")) or "seconds" not in row:
        raise ValueError("a row needs numbers of seconds")


def _validate_failed(row: Mapping[str, Any]) -> None:
    """Raise unless the row says which image failed, and whether its prompt was the reason."""
    if type(row["index"]) is not int or type(row["permanent"]) is not bool or not isinstance(row["id"], str):
        raise ValueError("a row needs an index, an id and whether it is permanent")
