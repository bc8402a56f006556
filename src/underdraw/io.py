"""File access: atomic writes, JSON and JSON Lines files, the cache folder, and packed code grids. No model code."""

from __future__ import annotations

import base64
import binascii
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError, UnderdrawError

UNFINISHED = ".*.part"  # glob pattern of the temporary files of `atomic_write`


def cache_dir() -> Path:
    """The folder for downloads and measurements: $UNDERDRAW_CACHE, or ~/.cache/underdraw."""
    return Path(os.environ.get("UNDERDRAW_CACHE") or Path.home() / ".cache" / "underdraw")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success, so that readers never see half of a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Delete temporary files that a killed process left behind."""
    for temporary in folder.glob(UNFINISHED):
        temporary.unlink()


def atomic_write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; missing parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, what: str, error: type[UnderdrawError] = ConfigError) -> Any:
    """Parse a JSON file. `what` names its content in the error message, for example "a benchmark summary"."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read as {what} ({reason}).") from None


class JsonlStore:
    """An append-only file of JSON objects, one per line, that can be resumed after a crash.

    Every appended row is on disk before `append` returns. A process killed while it writes leaves at most a last line
    without a newline: `read` ignores it and `resume` removes it.
    """

    def __init__(self, path: Path, validate: Callable[[Any], object] | None = None) -> None:
        """`validate` raises a ValueError, KeyError or TypeError for a row that is not what the file should hold."""
        self.path = path
        self._validate = validate

    def append(self, row: Mapping[str, Any]) -> None:
        with open(self.path, "ab") as file:
            file.write(_to_line(row))
            file.flush()
            os.fsync(file.fileno())

    def count(self) -> int:
        """Number of complete lines on disk."""
        return self.path.read_bytes().count(b"\n") if self.path.exists() else 0

    def read(self, *, skip_damaged: bool = False) -> list[dict[str, Any]]:
        """All complete rows. A damaged line is an error that names its number, or is left out."""
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(self._parse(line))
            except (ValueError, KeyError, TypeError):
                if not skip_damaged:
                    raise ConfigError(
                        f"line {number} of {self.path} is damaged; delete that line, or start again with --force."
                    ) from None
        return rows

    def resume(self, keep: Callable[[dict[str, Any]], bool] | None = None) -> list[dict[str, Any]]:
        """`read`, and remove a cut-off last line and the rows that `keep` rejects from the file."""
        rows = [row for row in self.read() if keep is None or keep(row)]
        if self.path.exists() and (len(rows) < self.count() or not self.path.read_bytes().endswith(b"\n")):
            self.rewrite(rows)
        return rows

    def rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole file atomically."""
        with atomic_write(self.path) as file:
            file.writelines(_to_line(row) for row in rows)

    def clear(self) -> None:
        """Delete the file if it exists."""
        self.path.unlink(missing_ok=True)

    def _parse(self, line: bytes) -> dict[str, Any]:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError("not a JSON object")
        if self._validate is not None:
            self._validate(row)
        return row


def _to_line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


def pack_grid(codes: NDArray[Any]) -> dict[str, Any]:
    """An integer grid (rows, cols) as a JSON object: its shape, and zlib-compressed little-endian int32 in base64."""
    rows, cols = codes.shape
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(codes, dtype="<i4").tobytes(), 9)).decode()
    return {"rows": rows, "cols": cols, "data": data}


def unpack_grid(packed: Any, source: str) -> NDArray[np.int32]:
    """The grid (rows, cols) that `pack_grid` packed; `source` says in the error message where it was read from."""
    try:
        raw = zlib.decompress(base64.b64decode(packed["data"], validate=True))
        return np.frombuffer(raw, dtype="<i4").reshape(packed["rows"], packed["cols"]).astype(np.int32)
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error):
        raise ConfigError(f"the codes in {source} are damaged; generate the image again.") from None
