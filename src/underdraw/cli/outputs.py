"""Checks of output paths, before a model is loaded: a run of hours must not fail, or replace a file, at its end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from underdraw.errors import ConfigError

MAX_NAME_BYTES = 255  # of a file name, on every usual file system


def check_outputs(outputs: Mapping[str, Path | None], *, force: bool) -> None:
    """Raise unless every output file, by its option, can be written and no two options name one file."""
    named: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        other = named.setdefault(real_path(path), option)
        if other != option:
            raise ConfigError(f"{path} is named twice, by {other} and {option}; give every file a name of its own.")
        check_new_file(path, force=force)


def check_new_file(path: Path, *, force: bool, may_replace: Callable[[Path], bool] | None = None) -> None:
    """Raise unless a file of this name can be written; an existing one only with `force` or `may_replace`."""
    check_name(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name.")
    if os.path.lexists(path):
        if not path.is_file():
            raise ConfigError(f"{path} is no regular file and is not replaced; give another name.")
        if not force and not (may_replace is not None and may_replace(path)):
            raise ConfigError(f"{path} exists; give another name, or --force to replace it.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; create it first.")
    check_writable(path.parent, path)


def check_png(option: str, path: Path | None) -> None:
    """Raise for an image whose name does not end in .png."""
    if path is not None and path.suffix.lower() != ".png":
        raise ConfigError(f"{option} {path} does not end in .png; images are written as PNG files.")


def check_file(path: Path, *, force: bool = True, may_replace: Callable[[Path], bool] | None = None) -> None:
    """`check_new_file` for a file whose folder may be missing."""
    check_name(path)
    if path.parent.is_dir():
        check_new_file(path, force=force, may_replace=may_replace)
    else:
        check_folder(path.parent)


def check_name(path: Path) -> None:
    """Raise for names that no file system takes."""
    for part in path.parts:
        if len(os.fsencode(part)) > MAX_NAME_BYTES:
            raise ConfigError(f"the name {part[:40]!r}... is longer than {MAX_NAME_BYTES} bytes; shorten it.")
    if not path.name or path.name == "..":
        raise ConfigError(f"{str(path)!r} is not a file name; give one.")


def check_folder(folder: Path) -> None:
    """Raise unless the folder can be created, or files be written into it."""
    if folder.parts and folder.name:
        check_name(folder)
    if os.path.islink(folder) and not folder.exists():
        raise ConfigError(f"{folder} is a link that leads nowhere; choose another folder.")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{folder} cannot be created: {existing} is a file; choose another folder.")
    check_writable(existing, folder)


def check_writable(folder: Path, path: Path) -> None:
    """Raise if no file can be created in the folder; the message names `path`."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another folder.") from None


def real_path(path: Path) -> str:
    """The absolute path with links followed, also where links lead in a circle."""
    return os.path.realpath(path)
