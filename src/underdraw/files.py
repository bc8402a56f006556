"""Files that appear whole or not at all, whatever stops the program while they are written; and where to keep some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".*.part"  # the names of files that are still being written, as a pattern


def cache() -> Path:
    """What is measured or fetched once and kept: the folder that UNDERDRAW_CACHE names, or one in the user's cache."""
    return Path(os.environ.get("UNDERDRAW_CACHE") or Path.home() / ".cache" / "underdraw")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
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
