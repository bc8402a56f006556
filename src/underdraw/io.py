"""File access: atomic writes, checked reads, folder locks, JSON Lines files, the cache folder, and packed code grids.

Every file that the package reads or writes goes through this module. Whatever is wrong with a file becomes one sentence
with its path. No model code.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import secrets
import stat
import tempfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import CheckpointError, ConfigError, UnderdrawError

UNFINISHED = ".*.part"  # glob pattern of the temporary files of `atomic_write`
LOCK_FILE = ".underdraw.lock"  # only on file systems that cannot lock a folder
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
MAX_JSON_BYTES = 2**28  # the largest published set of captions has 92 MB
MAX_JSON_DEPTH = 64
MAX_GRID_SIDE = 2**14  # cells of a code grid


def cache_dir() -> Path:
    """The folder for downloads and measurements: $UNDERDRAW_CACHE, or ~/.cache/underdraw."""
    if folder := os.environ.get("UNDERDRAW_CACHE"):
        return Path(folder)
    try:
        return Path.home() / ".cache" / "underdraw"
    except RuntimeError:  # no home folder
        return Path(tempfile.gettempdir()) / f"underdraw-{os.getuid()}"


def as_path(value: object, what: str) -> Path:
    """A path from a user of Python; anything that is no path is an error."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ConfigError(f"{what} {value!r} is not a path; pass text or a pathlib.Path.")
    return Path(value)


def expand_user(path: str | Path) -> Path:
    """The path with `~` and `~user` replaced; a user that does not exist is an error."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path} names the home folder of a user that does not exist; write out the path.") from None


def path_inside(folder: Path, name: object, what: str, error: type[UnderdrawError] = CheckpointError) -> Path:
    """The path of a file that another file names; a name that leads out of `folder` is an error."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise error(f"{what} names {name!r}, which is no file name; download it again.")
    parts = PurePath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise error(f"{what} names {name!r}, which is outside of {folder}; files are read from that folder only.")
    return folder / parts


def make_folder(folder: Path) -> None:
    """Create a folder and those that it is in; raises one sentence where that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created ({error.strerror}); choose another folder.") from None


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success, so that readers never see half of a file."""
    temporary = path.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file and is not replaced; give another name.")
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)  # also where the system does not say which file it was
        error.filename2 = None
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; file systems that cannot do that for folders are left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def is_leftover(path: Path) -> bool:
    """Whether a file is a temporary one of `atomic_write` or a lock, and not a user's."""
    return (path.name.startswith(".") and path.name.endswith(".part")) or path.name == LOCK_FILE


def remove_unfinished(folder: Path) -> None:
    """Delete temporary files that a killed process left behind; call it with the folder locked."""
    for temporary in folder.glob(UNFINISHED):
        if temporary.is_file():
            temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically; missing parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())


def atomic_write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; missing parent folders are created."""
    atomic_write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


class FolderLock:
    """A context manager: inside it, no other process holds the lock of the folder.

    The operating system drops the lock when the process ends, however it ends. The folder is created if it does not
    exist, and removed again if it is left empty. The lock is on the folder itself, so no lock file stays behind.
    """

    def __init__(self, folder: Path, what: str = "files") -> None:
        """`what` names the folder's content in the error message, for example "a run of images"."""
        self.folder, self.what = folder, what
        self._created: list[Path] = []  # deepest first
        self._descriptor = -1

    def __enter__(self) -> FolderLock:
        while self._descriptor < 0:
            missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._created += [path for path in missing if path not in self._created]
            self._lock()
        return self

    def _lock(self) -> None:
        """Try to lock; afterwards the descriptor is set unless the folder was replaced in the meantime."""
        try:
            import fcntl
        except ImportError:  # no such locks on this system; one process at a time is up to the user
            self._descriptor = os.open(os.devnull, os.O_RDONLY)
            return
        path = self.folder
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it: try again
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:  # network file systems lock files only, and only those open for writing
                os.close(descriptor)
                path = self.folder / LOCK_FILE
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    self._descriptor = descriptor
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing {self.what} into {self.folder}; wait until it ends, or choose another "
                "folder."
            ) from None
        finally:
            if self._descriptor != descriptor:
                os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        for path in self._created:
            with suppress(OSError):  # it holds something now
                path.rmdir()
        os.close(self._descriptor)
        self._descriptor, self._created = -1, []


@contextmanager
def open_regular(path: Path, what: str, error: type[UnderdrawError] = ConfigError) -> Iterator[BinaryIO]:
    """Open a file for reading; pipes, devices and folders are refused, and every failure is one sentence."""
    check_regular(path, what, error)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as reason:
        raise error(f"{path} cannot be read as {what} ({reason.strerror or reason}).") from None


def check_regular(path: Path, what: str, error: type[UnderdrawError] = ConfigError) -> int:
    """Raise unless `path` is a regular file; returns its size in bytes."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read as {what} ({getattr(reason, 'strerror', None) or reason}).") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise error(f"{path} cannot be read as {what}: it is {kind}; give a regular file.")
    return status.st_size


def read_bytes(path: Path, what: str, error: type[UnderdrawError] = ConfigError, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path, what, error) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{path} cannot be read as {what}: it has more than {limit} bytes.")
    return content


def read_text(path: Path, what: str, error: type[UnderdrawError] = ConfigError) -> str:
    """The content of a UTF-8 file, without a byte order mark."""
    raw = read_bytes(path, what, error)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = raw[: reason.start].count(b"\n") + 1
        raise error(f"line {line} of {path} is not UTF-8 text; save the file as UTF-8.") from None


def split_lines(text: str) -> list[str]:
    r"""Lines that end in \n or \r\n; `str.splitlines` would also split at U+2028, form feeds and other characters."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; a ValueError says what is wrong, values that are nested too deeply included."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        children = (item.values() if isinstance(item, dict) else item for item in containers)
        containers = [child for values in children for child in values if isinstance(child, dict | list)]
        if not containers:
            return value
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")


def read_json(path: Path, what: str, error: type[UnderdrawError] = ConfigError) -> Any:
    """Parse a JSON file. `what` names its content in the error message, for example "a benchmark summary"."""
    raw = read_bytes(path, what, error)
    try:
        return parse_json(raw.decode("utf-8-sig"))
    except ValueError as reason:
        raise error(f"{path} cannot be read as {what} ({reason}).") from None


def read_json_object(path: Path, what: str, error: type[UnderdrawError] = ConfigError) -> dict[str, Any]:
    """`read_json` of a file that must hold a JSON object."""
    value = read_json(path, what, error)
    if not isinstance(value, dict):
        raise error(f"{path} cannot be read as {what} (it holds {type(value).__name__} instead of a JSON object).")
    return value


class JsonlStore:
    """An append-only file of JSON objects, one per line, that can be resumed after a crash.

    Every appended row is on disk before `append` returns. A process killed while it writes leaves at most a last line
    without a newline: `read` ignores it and `resume` removes it. Of rows with the same `key` the last one counts.
    """

    def __init__(
        self,
        path: Path,
        validate: Callable[[Any], object] | None = None,
        key: Callable[[dict[str, Any]], Hashable] | None = None,
    ) -> None:
        """`validate` raises a ValueError, KeyError or TypeError for a row that is not what the file should hold."""
        self.path = path
        self._validate = validate
        self._key = key

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row; if that fails, what was written of it is removed again."""
        with open(self.path, "ab") as file:
            end = file.tell()
            try:
                file.write(_to_line(row))
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), end)
                error.filename = str(self.path)
                raise

    def count(self) -> int:
        """Number of complete lines on disk."""
        return sum(1 for _ in self._lines())

    def read(self, *, skip_damaged: bool = False) -> list[dict[str, Any]]:
        """All complete rows, once each. A damaged line is an error that names its number, or is left out."""
        scanned = self.scan(skip_damaged=skip_damaged)
        return list({offset if self._key is None else self._key(row): row for offset, row in scanned}.values())

    def scan(self, *, skip_damaged: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
        """Offset and content of every complete row, as a stream."""
        offset = 0
        for number, line in enumerate(self._lines(), start=1):
            try:
                row = self._parse(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                if not skip_damaged:
                    raise ConfigError(
                        f"line {number} of {self.path} is damaged; delete that line, or start again with --force."
                    ) from None
            else:
                yield offset, row
            offset += len(line)

    def resume(self, keep: Callable[[dict[str, Any]], bool] | None = None) -> list[dict[str, Any]]:
        """`read`, and remove from the file a cut-off last line, repeated rows and those that `keep` rejects."""
        rows = [row for row in self.read() if keep is None or keep(row)]
        if self.path.exists() and (len(rows) < self.count() or self._is_cut_off()):
            self.rewrite(rows)
        return rows

    def rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the whole file atomically."""
        with atomic_write(self.path) as file:
            file.writelines(_to_line(row) for row in rows)

    def clear(self) -> None:
        """Delete the file if it exists."""
        self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[bytes]:
        """The complete lines; a binary file splits at \\n alone."""
        if not self.path.exists():
            return
        with open_regular(self.path, "JSON lines") as file:
            while (line := file.readline(MAX_JSON_BYTES)).endswith(b"\n"):
                yield line

    def _is_cut_off(self) -> bool:
        with open_regular(self.path, "JSON lines") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def _parse(self, line: bytes) -> dict[str, Any]:
        row = parse_json(line)
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
        rows, cols = packed["rows"], packed["cols"]
        if not all(type(side) is int and 0 <= side <= MAX_GRID_SIDE for side in (rows, cols)):
            raise ValueError("sides out of range")
        size = 4 * rows * cols  # never decompress more than that
        raw = zlib.decompressobj().decompress(base64.b64decode(packed["data"], validate=True), size + 1)
        return np.frombuffer(raw, dtype="<i4").reshape(rows, cols).astype(np.int32)
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error):
        raise ConfigError(f"the codes in {source} are damaged; generate the image again.") from None
