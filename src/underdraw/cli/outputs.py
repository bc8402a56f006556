"""Checks of output paths, before a model is loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from underdraw.errors import ConfigError


def check_new_file(path: Path, *, force: bool) -> None:
    """Raise unless a file of this name can be written; an existing one only with `force`."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name.")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; give another name, or --force to replace it.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}; create it first.")
    check_writable(path.parent, path)


def check_new_png(path: Path, *, force: bool) -> None:
    """`check_new_file` for an image."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path} does not end in .png; images are written as PNG files.")
    check_new_file(path, force=force)


def check_file(path: Path) -> None:
    """Raise unless a file can be written or replaced; its folder may be missing."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file name.")
    check_folder(path.parent)


def check_folder(folder: Path) -> None:
    """Raise unless the folder can be created, or files be written into it."""
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
