"""GenerationRequest: the validated arguments of one call of the pipeline."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from underdraw.errors import ConfigError, unknown
from underdraw.models.config import ImageSize
from underdraw.models.hub import HubOptions
from underdraw.prompts import check_prompt, check_text
from underdraw.ranges import MAX_IMAGES, MAX_SEED, check_guidance, check_sampling

if TYPE_CHECKING:
    from typing_extensions import Self

Seed = int | Sequence[int] | None
Generator = torch.Generator | Sequence[torch.Generator] | None


PARTS = ("drafter", "tree", "verifier", "proposal")  # of a pipeline, which may be assigned
_NO_STEPS = "Codes are drawn one after the other, without denoising steps; leave it out."
_TEXT_ONLY = "Only texts are read; leave it out."
CALL_ADVICE = {  # arguments of other libraries' pipelines, and what to do instead
    **dict.fromkeys(("num_inference_steps", "timesteps", "sigmas", "eta", "strength"), _NO_STEPS),
    **dict.fromkeys(("latents", "image", "mask_image", "prompt_embeds", "negative_prompt_embeds"), _TEXT_ONLY),
    **dict.fromkeys(("max_new_tokens", "max_length"), "height and width set the number of tokens; leave it out."),
    "n": "Use num_images_per_prompt.",
    "do_sample": "temperature=0 is greedy.",
    "callback": "Use callback_on_step_end.",
    "callback_steps": "callback_on_step_end is called after every pass; leave it out.",
    "callback_on_step_end_tensor_inputs": "The callback gets the same details in every pass; leave it out.",
}
LOADING_ADVICE = {
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantization_config"), 'Use weights="int8", "fp8" or "int4".'),
    "device_map": 'Use device="cuda"; a model has to fit on one device.',
    "variant": "Use dtype; weights are converted while they are read.",
    "use_safetensors": "Safetensors are used where there are any; leave it out.",
    "trust_remote_code": "No code of a repository is run; leave it out.",
    "low_cpu_mem_usage": "Weights are always copied tensor by tensor; leave it out.",
}
ATTRIBUTE_ADVICE = {
    **{name: f'use pipe.to("{name}")' for name in ("cuda", "cpu")},
    **{name: f"use pipe.to(torch.{dtype})" for name, dtype in (("half", "float16"), ("float", "float32"))},
    "bfloat16": "use pipe.to(torch.bfloat16)",
    "enable_": 'leave it out, or save memory by from_pretrained(..., weights="int8")',
    **dict.fromkeys(("unet", "transformer", "vae", "text_encoder", "tokenizer"), "the networks are in pipe.components"),
}


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
        for name in ("guidance", "temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise ConfigError(f"{name} {value!r} is not a number; pass a number or None.")
        check_integer("top_k", self.top_k)
        check_guidance(self.guidance)
        check_sampling(self.temperature, self.top_k, self.top_p)

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


def check_options(
    function: str, options: Mapping[str, Any], allowed: Collection[str], advice: Mapping[str, str]
) -> None:
    """Raise a ConfigError for an argument that `function` does not take; `advice` says what to do instead."""
    for name in options:
        if name not in allowed:
            raise unknown(f"option of {function}", name, allowed, advice.get(name, ""))


def check_call_options(options: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Raise a ConfigError for an argument that a call of a pipeline does not take."""
    parts = {name: f"Set it before the call: pipe.{name} = {options[name]!r}." for name in PARTS if name in options}
    check_options("a call", options, allowed, {**CALL_ADVICE, **parts})


def check_loading_options(
    function: Callable[..., Any], options: Mapping[str, Any], drafter: object, tree: object
) -> None:
    """Raise a ConfigError for an argument that `from_pretrained` does not take, and for None as drafter or tree."""
    named = inspect.signature(function).parameters.keys() - {"model", "hub_options"}
    allowed = [*named, *(field.name for field in dataclasses.fields(HubOptions))]
    check_options("from_pretrained", options, allowed, LOADING_ADVICE)
    for name, part in (("tree", tree), ("drafter", drafter)):
        check_not_none(name, part)


def check_not_none(name: str, part: object) -> None:
    """Raise a ConfigError for a tree or drafter that stands for no speculation, and say what does."""
    if part is None or (name == "drafter" and part == "none" and not Path("none").exists()):
        raise ConfigError(f"there is no {name} {part!r}; the tree 'none' (--tree none) draws without speculation.")


class AdvisedAttributes:
    """Refuses attributes that pipelines of other libraries have and this one lacks, and says what to do instead."""

    def __new__(cls, model: object = None, *_: object, **__: object) -> Self:
        if isinstance(model, str | Path):
            raise ConfigError(
                f"a pipeline is made of a loaded model; use {cls.__name__}.from_pretrained({str(model)!r})."
            )
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        if name in RequestOptions.__annotations__:
            raise ConfigError(f"{name} is an argument of a call, not of the pipeline: pipe(prompt, {name}={value!r}).")
        if name == "scheduler":
            raise ConfigError("there is no noise scheduler to replace; pipe.scheduler() draws many requests together.")
        if name in ("tree", "drafter"):
            check_not_none(name, value)
        similar = difflib.get_close_matches(name, PARTS, n=1, cutoff=0.8)
        if similar and name not in PARTS and not name.startswith("_"):
            raise ConfigError(f"a pipeline has no {name!r}; did you mean pipe.{similar[0]}?")
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> Any:
            advice = ATTRIBUTE_ADVICE.get("enable_" if name.startswith("enable_") else name)
            if advice is not None:
                raise AttributeError(f"a pipeline has no {name!r}; {advice}.")
            return object.__getattribute__(self, name)  # raises the usual error


def check_integer(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} {value!r} is not a whole number; pass an int.")


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
    elif isinstance(seed, Iterable) and not isinstance(seed, str | bytes | Mapping):
        seeds = list(itertools.islice(seed, MAX_IMAGES + 1))
    else:
        raise ConfigError(f"seed {seed!r} is not allowed; use a whole number, or a list with one per image.")
    if len(seeds) != images:
        kind = "seed" if generator is None else "generator"
        raise ConfigError(f"{len(seeds)} {kind}s came with {images} images; pass one {kind}, or one per image.")
    for value in seeds:
        if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= MAX_SEED:
            raise ConfigError(f"seed {value!r} is not allowed; use whole numbers from 0 to 2**62 - 1.")
    return [int(value) for value in seeds]


def _initial_seed(generator: object) -> int:
    if not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator must be a torch.Generator or a list of them, not {type(generator).__name__}.")
    return generator.initial_seed() % 2**62
