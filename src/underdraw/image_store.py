"""The images of a run on disk: PNG files with metadata.jsonl, or shards that are written whole."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from underdraw.errors import ConfigError
from underdraw.io import FolderLock, JsonlStore, atomic_write, check_regular, read_bytes, read_json
from underdraw.shards import Format, StoredImage, check_row, find_shards, read_shard, shard_name, write_shard

METADATA_FILE = "metadata.jsonl"
OLD_METADATA_FILE = "manifest.jsonl"  # of version 0.1
UNFINISHED_FOLDER = ".unfinished"


@dataclass(frozen=True, slots=True)
class RunStorage:
    """How many images a run has and how they are stored."""

    images: int
    format: Format = "folder"
    shard_size: int = 1000
    columns: Mapping[str, str] | None = None  # Parquet types of the prompts' further columns


class ImageStore(Protocol):
    """The images of a run on disk."""

    def resume(self) -> None: ...
    def has(self, index: int) -> bool: ...
    def add(self, image: StoredImage) -> None: ...
    def fail(self, index: int) -> None: ...
    def reopen(self, index: int, failed: Mapping[int, Any]) -> None: ...
    def finish(self) -> None: ...
    def images(self) -> Iterator[StoredImage]: ...
    def rows(self) -> Iterator[dict[str, Any]]: ...
    def delete(self) -> None: ...


class ImageFiles:
    """PNG files, and a row for each in metadata.jsonl, as Hugging Face `datasets` reads it (imagefolder)."""

    def __init__(self, folder: Path, journal: str = METADATA_FILE) -> None:
        """New rows are appended to `journal`; each rank has its own until the run is finished."""
        self.folder, self._journal = folder, JsonlStore(folder / journal)
        self._indices: set[int] = set()

    def resume(self) -> None:
        self._indices = set()
        _truncate_to_lines(self._journal.path)  # not those of other ranks, who may be writing
        for path in sorted(self.folder.glob("metadata*.jsonl")):
            for _, row in complete_rows(path):
                if (self.folder / row["file_name"]).is_file():
                    self._indices.add(row["index"])

    def has(self, index: int) -> bool:
        return index in self._indices

    def add(self, image: StoredImage) -> None:
        name = image_name(image.index)
        with atomic_write(self.folder / name) as file:
            file.write(image.png)
        self._journal.append({"file_name": name, **image.row})
        self._indices.add(image.index)

    def fail(self, index: int) -> None:
        """Nothing to do: only a shard has to know what it will not get."""

    def reopen(self, index: int, failed: Mapping[int, Any]) -> None:
        """Nothing to do: a row can always be added."""

    def finish(self) -> None:
        """Sort the rows by index; of two rows of one image the later counts, rows without an image are dropped."""
        paths = sorted(self.folder.glob("metadata*.jsonl"))
        rows = {
            row["index"]: (path, offset)
            for path in paths
            for offset, row in complete_rows(path)
            if (self.folder / row["file_name"]).is_file()
        }
        with ExitStack() as stack:
            files = {path: stack.enter_context(open(path, "rb")) for path in paths}
            with atomic_write(self.folder / METADATA_FILE) as target:
                for index in sorted(rows):
                    path, offset = rows[index]
                    files[path].seek(offset)
                    target.write(files[path].readline())
        for path in paths:
            if path.name != METADATA_FILE:
                path.unlink()

    def rows(self) -> Iterator[dict[str, Any]]:
        return (row for path in sorted(self.folder.glob("metadata*.jsonl")) for _, row in complete_rows(path))

    def images(self) -> Iterator[StoredImage]:
        for _, row in complete_rows(self.folder / METADATA_FILE):
            yield StoredImage(read_bytes(self.folder / row["file_name"], "an image"), row)

    def delete(self) -> None:
        for path in [*self.folder.glob("metadata*.jsonl"), *self.folder.glob(OLD_METADATA_FILE)]:
            for row in JsonlStore(path).read(skip_damaged=True):
                name = str(row.get("file_name", row.get("file", "")))
                if name and Path(name).name == name:
                    (self.folder / name).unlink(missing_ok=True)
            path.unlink()


class Shards:
    """WebDataset or Parquet shards of consecutive images. A shard is written whole, once all its images are drawn."""

    def __init__(self, folder: Path, storage: RunStorage) -> None:
        self.folder, self._storage = folder, storage
        self._finished: set[int] = set()  # numbers of shards
        self._waiting: set[int] = set()  # indices of images in `.unfinished`

    def resume(self) -> None:
        self._finished = {int(path.stem.removeprefix("shard-")) for path in find_shards(self.folder)}
        self._waiting = set()
        for folder in (self.folder / UNFINISHED_FOLDER).glob("*"):
            if not folder.is_dir() or not folder.name.isdecimal():  # not ours
                continue
            if int(folder.name) in self._finished:  # stopped while the files were removed
                shutil.rmtree(folder, ignore_errors=True)
                continue
            self._waiting |= {int(path.stem) for path in _waiting_files(folder) if _is_whole(path)}
            self._write_if_complete(int(folder.name))

    def has(self, index: int) -> bool:
        return index // self._storage.shard_size in self._finished or index in self._waiting

    def add(self, image: StoredImage) -> None:
        _write_waiting(self._unfinished(image.index // self._storage.shard_size), image)
        self._waiting.add(image.index)
        self._write_if_complete(image.index // self._storage.shard_size)

    def fail(self, index: int) -> None:
        number = index // self._storage.shard_size
        (self._unfinished(number) / f"{index:09d}.failed").touch()
        self._waiting.add(index)
        self._write_if_complete(number)

    def reopen(self, index: int, failed: Mapping[int, Any]) -> None:
        """Take a shard apart again, so that a missing image can be added."""
        number = index // self._storage.shard_size
        folder, path = self._unfinished(number), self._shard(number)
        if path.exists():
            for image in read_shard(path):
                _write_waiting(folder, image)
            for other in failed:
                if other // self._storage.shard_size == number:
                    (folder / f"{other:09d}.failed").touch()
            path.unlink()
        (folder / f"{index:09d}.failed").unlink(missing_ok=True)
        self.resume()

    def finish(self) -> None:
        with suppress(OSError):
            (self.folder / UNFINISHED_FOLDER).rmdir()

    def rows(self) -> Iterator[dict[str, Any]]:
        return (image.row for image in self.images())

    def images(self) -> Iterator[StoredImage]:
        return itertools.chain.from_iterable(map(read_shard, find_shards(self.folder)))

    def delete(self) -> None:
        shutil.rmtree(self.folder / UNFINISHED_FOLDER, ignore_errors=True)
        for path in find_shards(self.folder):
            path.unlink()

    def _shard(self, number: int) -> Path:
        return self.folder / shard_name(number, self._storage.format)

    def _unfinished(self, number: int) -> Path:
        folder = self.folder / UNFINISHED_FOLDER / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write_if_complete(self, number: int) -> None:
        """Write a shard if nothing is missing. Ranks share the folder: the one that adds the last image writes it."""
        folder, size = self._unfinished(number), self._storage.shard_size
        count = min(size, self._storage.images - number * size)
        if len(_waiting_files(folder)) < count:
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(FolderLock(folder, "a shard"))
                files = _waiting_files(folder)
            except ConfigError:  # another rank is writing it
                files = []
            if len(files) >= count:  # or else another rank has just written it
                images = map(_read_waiting, [path for path in files if path.suffix == ".json"])
                write_shard(self._shard(number), images, self._storage.columns or {})
                shutil.rmtree(folder, ignore_errors=True)
        self._finished.add(number)
        self._waiting = {index for index in self._waiting if index // size != number}


def _write_waiting(folder: Path, image: StoredImage) -> None:
    """Store an image of an unfinished shard."""
    for suffix, content in (("png", image.png), ("json", json.dumps(image.row, ensure_ascii=False).encode())):
        with atomic_write(folder / f"{image.index:09d}.{suffix}") as file:  # the row last: then it counts
            file.write(content)


def _waiting_files(folder: Path) -> list[Path]:
    """The rows of an unfinished shard and the marks of images that failed, by index."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".failed") and path.stem.isdecimal())


def _read_waiting(path: Path) -> StoredImage:
    """An image of an unfinished shard, by the path of its row."""
    row = read_json(path, "the row of an image")
    check_row(row)
    return StoredImage(read_bytes(path.with_suffix(".png"), "an image"), row)


def _is_whole(path: Path) -> bool:
    """Whether an image of an unfinished shard can be read; a damaged one is removed, so that it is drawn again."""
    try:
        if path.suffix == ".json":
            _read_waiting(path)
    except (ValueError, KeyError):  # a ConfigError is a ValueError
        path.unlink()
        return False
    return True


def complete_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Offset and row of every complete line of metadata.jsonl; a damaged line is an error that names its number."""
    return JsonlStore(path, validate_row).scan()


def validate_row(row: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError unless the row names its image's file and has the statistics of its passes."""
    check_row(row)
    if row["file_name"] != image_name(row["index"]):
        raise ValueError("a row needs the name of the file that belongs to it")


def image_name(index: int) -> str:
    """The file of an image in a folder."""
    return f"{index:05d}.png"


def _truncate_to_lines(path: Path) -> None:
    """Remove a last line that was cut off, so that the next row starts on a line of its own."""
    if not path.exists():
        return
    check_regular(path, "rows of images")
    with open(path, "rb+") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - 2**24))
        tail = file.read()
        file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
