"""Optional packages: imported on first use, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from underdraw.errors import UnsupportedError


def require_package(name: str, extra: str, purpose: str = "this") -> Any:
    """Import the module `name`, which `pip install underdraw[extra]` installs; `purpose` says what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UnsupportedError(
            f"{purpose} needs the package {name.partition('.')[0]}; install it with: pip install 'underdraw[{extra}]'"
        ) from None


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
