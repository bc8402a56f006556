"""Exceptions for errors that the caller can fix. Any other exception that escapes is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_MESSAGE = 1200  # characters of an error


def one_line(text: str) -> str:
    """A message without line breaks, and without its middle if it is long: it may repeat what a damaged file says."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"


class UnderdrawError(Exception):
    """Base class; the message is one sentence for the user."""

    exit_code = 2  # of the command that it ends

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(UnderdrawError, ValueError):
    """An invalid option or size, or components that do not work together."""


class CheckpointError(UnderdrawError):
    """Weights that are missing, damaged or of another model."""


class CapacityError(UnderdrawError):
    """A request that does not fit into memory or into the KV cache."""


class UnsupportedError(UnderdrawError):
    """A feature that this model, device or installation does not have."""


class DivergedError(UnderdrawError):
    """A training whose loss is not finite any more."""

    exit_code = 1


def check_counts(what: str, limit: int, **values: object) -> None:
    """Raise a ConfigError unless all values are whole numbers from 1 to `limit`."""
    for name, value in values.items():
        if type(value) is not int or not 1 <= value <= limit:
            raise ConfigError(
                f"{what} with {name} {value!r} is impossible; it must be a whole number from 1 to {limit}."
            )


def unknown(kind: str, name: object, allowed: Iterable[str], advice: str = "") -> ConfigError:
    """The error for a name that is not one of `allowed`, with `advice`, or a suggestion if one of them is similar."""
    names = sorted(allowed)
    similar = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    if similar and not advice:
        advice = f"Did you mean {similar[0]!r}?"
    return ConfigError(f"unknown {kind} {name!r}.{advice and ' '}{advice} Allowed: {', '.join(names) or 'none'}.")


def first_line(error: Exception) -> str:
    """The first line of an error message, without its full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
