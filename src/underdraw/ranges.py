"""Ranges of the numbers that users give: seeds, counts, sampling settings. No torch: bad options answer at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real

from underdraw.errors import ConfigError

MAX_SEED = 2**62 - 1
MAX_GUIDANCE = 10**4  # far above any use; larger ones overflow float32
MAX_IMAGES = 10**6  # of one call or command


def check_integer(name: str, value: object) -> None:
    """Raise a ConfigError unless a value is a whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} {value!r} is not a whole number; pass an int.")


def check_seeds(seeds: object) -> list[int]:
    """The seeds of a batch as a list; raises a ConfigError unless they are whole numbers from 0 to MAX_SEED."""
    if not isinstance(seeds, Iterable):
        raise ConfigError(f"seeds {seeds!r} must be a list of whole numbers, one per image.")
    values = list(seeds)
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= MAX_SEED:
            raise ConfigError(f"seed {value!r} is not allowed; use whole numbers from 0 to 2**62 - 1.")
    return [int(value) for value in values]


def check_real(name: str, value: object) -> None:
    """Raise a ConfigError unless a value is a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{name} {value!r} is not a number; pass a number.")


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise a ConfigError for sampling settings that are out of range."""
    check_real("temperature", temperature)
    check_integer("top_k", top_k)
    check_real("top_p", top_p)
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"temperature {temperature} must be 0 (greedy) or a positive number.")
    if 0 < temperature < 1e-4:
        raise ConfigError(f"temperature {temperature} is too small to divide by; use 0 for greedy or at least 0.0001.")
    if top_k < 0:
        raise ConfigError(f"top_k {top_k} must be 0 (off) or a positive number of codes.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p {top_p} must lie in (0, 1]; 1 turns it off.")


def check_guidance(guidance: float) -> None:
    """Raise a ConfigError for a guidance scale that is out of range."""
    check_real("guidance", guidance)
    if not 0 <= guidance <= MAX_GUIDANCE:  # also refuses nan
        raise ConfigError(
            f"guidance {guidance} must be a number of at least 0 and at most {MAX_GUIDANCE}; 1 turns it off."
        )


def check_seed(seed: int, images: int = 1) -> None:
    """Raise a ConfigError unless the seeds of all images, seed + i, are in the range of seeds."""
    if not 0 <= seed <= MAX_SEED - (images - 1):
        last = f"; that of the last image is {seed + images - 1}" if 0 <= seed <= MAX_SEED else ""
        raise ConfigError(f"--seed {seed} is not allowed; use whole numbers from 0 to 2**62 - 1{last}.")


def check_number(option: str, value: float | None, low: float, high: float) -> None:
    """Raise a ConfigError unless an option is left out or lies in the range, both ends included."""
    if value is not None and not low <= value <= high:  # also refuses nan
        raise ConfigError(f"{option} {value} is out of range; use {low:g} to {high:g}.")
