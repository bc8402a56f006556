"""Files: atomic writes, the cache folder, and grids of integers as short text. Knows no model."""

from __future__ import annotations

import base64
import binascii
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError

UNFINISHED = ".*.part"  # the names of files that are still being written, as a pattern


def cache() -> Path:
    """What is measured or fetched once and kept: the folder that UNDERDRAW_CACHE names, or one in the user's cache."""
    return Path(os.environ.get("UNDERDRAW_CACHE") or Path.home() / ".cache" / "underdraw")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` when it is complete and on disk."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def pack_grid(cells: NDArray[Any]) -> dict[str, Any]:
    """Whole numbers (rows, cols) as JSON: the two sides, and compressed little-endian 32-bit numbers in base64."""
    rows, cols = cells.shape
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(cells, dtype="<i4").tobytes(), 9)).decode()
    return {"rows": rows, "cols": cols, "data": data}


def unpack_grid(packed: Any, where: str) -> NDArray[np.int32]:
    """What `pack_grid` was given, (rows, cols); `where` says in an error where the text stood."""
    try:
        raw = zlib.decompress(base64.b64decode(packed["data"], validate=True))
        return np.frombuffer(raw, dtype="<i4").reshape(packed["rows"], packed["cols"]).astype(np.int32)
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error):
        raise ConfigError(f"the codes in {where} are damaged; draw the picture again.") from None
