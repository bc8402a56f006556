"""GenerationRequest: the validated arguments of one call of the pipeline."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, TypedDict

import torch

from underdraw.errors import ConfigError
from underdraw.models.config import ImageSize
from underdraw.prompts import check_prompt, check_text
from underdraw.ranges import MAX_IMAGES, check_guidance, check_integer, check_sampling, check_seeds

Seed = int | Sequence[int] | None
Generator = torch.Generator | Sequence[torch.Generator] | None


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `Pipeline.request`, which `Pipeline.__call__` passes on."""

    negative_prompt: str | Sequence[str] | None
    height: int | None
    width: int | None
    guidance_scale: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    num_images_per_prompt: int
    seed: Seed
    generator: Generator


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call: B images with a prompt and a seed each, and the settings that they share."""

    prompts: list[str]  # (B,)
    negative_prompts: list[str | None]  # (B,)
    seeds: list[int]  # (B,)
    size: ImageSize
    guidance: float
    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        lists = (self.prompts, self.negative_prompts, self.seeds)
        if not all(isinstance(values, list) for values in lists) or len({len(values) for values in lists}) != 1:
            raise ConfigError("a request needs a prompt, a negative prompt and a seed per image; use pipe.request().")
        if not isinstance(self.size, ImageSize):
            raise ConfigError(f"the size {self.size!r} of a request is no ImageSize; use pipe.request().")
        check_guidance(self.guidance)
        check_sampling(self.temperature, self.top_k, self.top_p)
        for name, kind in (("guidance", float), ("temperature", float), ("top_k", int), ("top_p", float)):
            value = getattr(self, name)
            if not isinstance(value, int | float):  # numpy's float32 cannot be written to the metadata of a PNG
                object.__setattr__(self, name, kind(value))

    def select(self, indices: Sequence[int]) -> GenerationRequest:
        """The request of some of the images, in this order."""
        return replace(
            self,
            prompts=[self.prompts[index] for index in indices],
            negative_prompts=[self.negative_prompts[index] for index in indices],
            seeds=[self.seeds[index] for index in indices],
        )

    def settings(self) -> dict[str, Any]:
        """Everything that the images share, for records."""
        return {
            "guidance": self.guidance,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "height": self.size.height,
            "width": self.size.width,
            "negative_prompt": self.negative_prompt,
        }

    @property
    def negative_prompt(self) -> str | list[str | None] | None:
        """The negative prompt of all images, or the list of them where they differ."""
        return self.negative_prompts[0] if len(set(self.negative_prompts)) == 1 else self.negative_prompts


def check_request(request: object) -> None:
    """Raise a ConfigError for anything that is no request, such as a prompt."""
    if not isinstance(request, GenerationRequest):
        raise ConfigError(f"a request is needed, not {request!r}; make one with pipe.request(PROMPT, seed=0).")


def expand_prompts(prompt: str | Sequence[str], images_per_prompt: int) -> list[str]:
    """The prompt of every image: each prompt `images_per_prompt` times in a row."""
    texts = _texts(prompt, "prompt")
    if not texts:
        raise ConfigError("the list of prompts is empty; pass at least one prompt.")
    check_integer("num_images_per_prompt", images_per_prompt)
    if images_per_prompt < 1:
        raise ConfigError(f"num_images_per_prompt is {images_per_prompt}; use at least 1.")
    if len(texts) * images_per_prompt > MAX_IMAGES:
        raise ConfigError(f"{len(texts)} x {images_per_prompt} images are more than {MAX_IMAGES}; draw fewer at once.")
    for text in texts:
        check_prompt(text)
    return [text for text in texts for _ in range(images_per_prompt)]


def expand_negative_prompts(
    negative_prompt: str | Sequence[str] | None, images: int, images_per_prompt: int
) -> list[str | None]:
    """The negative prompt of every image: one for all, or one per prompt."""
    if negative_prompt is None:
        return [None] * images
    texts = _texts(negative_prompt, "negative_prompt")
    for text in texts:
        check_text(text)
    if isinstance(negative_prompt, str):
        return [negative_prompt] * images
    if len(texts) * images_per_prompt != images:
        raise ConfigError(
            f"{len(texts)} negative prompts were passed with {images // images_per_prompt} prompts; "
            "pass one text for all, or one per prompt."
        )
    return [text for text in texts for _ in range(images_per_prompt)]


def _texts(value: str | Sequence[str], name: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping | torch.Tensor):
        raise ConfigError(f"a {name} must be text or a list of texts, not {type(value).__name__}.")
    return list(itertools.islice(value, MAX_IMAGES + 1))


def resolve_seeds(seed: Seed, generator: Generator, images: int) -> list[int]:
    """One seed per image: seed + i, the listed ones, or random ones. A generator stands for its initial seed."""
    if seed is not None and generator is not None:
        raise ConfigError("both seed and generator were passed; use one of them.")
    if isinstance(generator, Iterable):
        seed = [_initial_seed(item) for item in itertools.islice(generator, MAX_IMAGES + 1)]
    elif generator is not None:
        seed = _initial_seed(generator)
    if seed is None:
        seed = secrets.randbelow(2**31)
    if isinstance(seed, Integral):
        seeds = [int(seed) + index for index in range(images)]
    elif isinstance(seed, Iterable) and not isinstance(seed, str | bytes | Mapping | torch.Tensor):
        seeds = list(itertools.islice(seed, MAX_IMAGES + 1))
    else:
        raise ConfigError(f"seed {seed!r} is not allowed; use a whole number, or a list with one per image.")
    if len(seeds) != images:
        kind = "seed" if generator is None else "generator"
        raise ConfigError(f"{len(seeds)} {kind}s came with {images} images; pass one {kind}, or one per image.")
    return check_seeds(seeds)


def _initial_seed(generator: object) -> int:
    if not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator must be a torch.Generator or a list of them, not {type(generator).__name__}.")
    return generator.initial_seed() % 2**62
