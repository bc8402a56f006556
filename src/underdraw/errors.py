"""The exceptions underdraw raises for what a caller can mend. Anything else that escapes is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnderdrawError(Exception):
    """Base of all errors that carry one sentence for the user."""


class ConfigError(UnderdrawError, ValueError):
    """An option, a size or a combination of parts that cannot work."""


class CheckpointError(UnderdrawError):
    """A file of weights that is missing, damaged or not what it was taken for."""


class CapacityError(UnderdrawError):
    """A request that does not fit the memory or the cache it was given."""


class UnsupportedError(UnderdrawError):
    """A feature that this model, device or installation does not have."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> ConfigError:
    """An error for a name that is not one of `allowed`, with the nearest one if there is a near one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {given!r}.{hint} Allowed: {', '.join(names) or 'none'}.")
