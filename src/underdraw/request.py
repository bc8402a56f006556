"""Job: one call of the pipeline, checked and complete, and the seeds of its images. Knows no model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import torch

from underdraw.errors import ConfigError
from underdraw.models.family import ImageSize
from underdraw.prompts import check_prompt

Seed = int | Sequence[int] | None
Generator = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is drawn, with which seeds and settings."""

    prompts: list[str]
    negative: str | None
    seeds: list[int]
    size: ImageSize
    guidance: float
    temperature: float
    top_k: int
    top_p: float


def texts_of(prompt: str | Sequence[str], copies: int) -> list[str]:
    """The prompt of every image: each given one `copies` times."""
    texts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not texts:
        raise ConfigError("no prompts were given; a call needs at least one.")
    if copies < 1:
        raise ConfigError(f"{copies} images per prompt cannot be drawn; use at least 1.")
    for text in texts:
        check_prompt(text)
    return [text for text in texts for _ in range(copies)]


def seeds_of(seed: Seed, generator: Generator, count: int) -> list[int]:
    """One seed per image: seed + i, or the given ones. A generator stands for the seed that it was made with."""
    if seed is not None and generator is not None:
        raise ConfigError("both seed and generator were given; use one of them.")
    if generator is not None:
        many = [generator] if isinstance(generator, torch.Generator) else list(generator)
        own = [g.initial_seed() % 2**62 for g in many]
        seed = own[0] if isinstance(generator, torch.Generator) else own
    if seed is None:
        seed = secrets.randbelow(2**31)
    seeds = [int(seed) + index for index in range(count)] if isinstance(seed, Integral) else list(cast(Any, seed))
    if len(seeds) != count:
        raise ConfigError(f"{len(seeds)} seeds came with {count} images; give one seed, or one per image.")
    wrong = [value for value in seeds if not isinstance(value, Integral) or not 0 <= int(value) < 2**62]
    if wrong:
        raise ConfigError(f"seed {wrong[0]!r} is not allowed; use whole numbers from 0 to 2**62 - 1.")
    return [int(value) for value in seeds]
