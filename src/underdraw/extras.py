"""Optional packages: imported when they are needed, or one sentence that says how to install them."""

from __future__ import annotations

import importlib
from typing import Any

from underdraw.errors import UnsupportedError


def package(name: str, what: str, extra: str) -> Any:
    """The module `name`, which the extra `extra` brings."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UnsupportedError(
            f"{what} needs the package {name.partition('.')[0]}; install it with: pip install 'underdraw[{extra}]'"
        ) from None
