"""What to do instead of arguments and attributes that pipelines of other libraries have and this one lacks."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from underdraw.errors import ConfigError, check_counts, unknown
from underdraw.models.hub import HubOptions
from underdraw.ranges import MAX_IMAGES
from underdraw.request import RequestOptions

PARTS = ("drafter", "tree", "verifier", "proposal")  # of a pipeline, which may be assigned
_NO_STEPS = "Codes are drawn one after the other, without denoising steps; leave it out."
_TEXT_ONLY = "Only texts are read; leave it out."
CALL_ADVICE = {  # arguments of other libraries' pipelines, and what to do instead
    **dict.fromkeys(("num_inference_steps", "timesteps", "sigmas", "eta", "strength"), _NO_STEPS),
    **dict.fromkeys(("latents", "image", "mask_image", "prompt_embeds", "negative_prompt_embeds"), _TEXT_ONLY),
    **dict.fromkeys(("max_new_tokens", "max_length"), "height and width set the number of tokens; leave it out."),
    **dict.fromkeys(("output_type", "token_stats", "callback_on_step_end"), "Pass it to generate()."),  # of `request`
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
READ_ONLY = {  # attributes of a pipeline that are not assigned, and how to change them
    **dict.fromkeys(("device", "dtype"), "use pipe.to(device, dtype)"),
    **dict.fromkeys(("numerics", "weights"), "load the model again: Pipeline.from_pretrained(MODEL, {name}={value!r})"),
}
ATTRIBUTE_ADVICE = {
    **{name: f'use pipe.to("{name}")' for name in ("cuda", "cpu")},
    **{name: f"use pipe.to(torch.{dtype})" for name, dtype in (("half", "float16"), ("float", "float32"))},
    "bfloat16": "use pipe.to(torch.bfloat16)",
    "enable_": 'leave it out, or save memory by from_pretrained(..., weights="int8")',
    **dict.fromkeys(("unet", "transformer", "vae", "text_encoder", "tokenizer"), "the networks are in pipe.components"),
}


def check_options(
    function: str, options: Mapping[str, Any], allowed: Collection[str], advice: Mapping[str, str]
) -> None:
    """Raise a ConfigError for an argument that `function` does not take; `advice` says what to do instead."""
    for name in options:
        if name not in allowed:
            raise unknown(f"option of {function}", name, allowed, advice.get(name, ""))


def check_call_options(options: Mapping[str, Any], allowed: Collection[str], function: str = "a call") -> None:
    """Raise a ConfigError for an argument that a call of a pipeline, or its `request`, does not take."""
    parts = {name: f"Set it before the call: pipe.{name} = {options[name]!r}." for name in PARTS if name in options}
    check_options(function, options, allowed, {**CALL_ADVICE, **parts})


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

    def __setattr__(self, name: str, value: object) -> None:
        if name in RequestOptions.__annotations__:
            raise ConfigError(f"{name} is an argument of a call, not of the pipeline: pipe(prompt, {name}={value!r}).")
        if name == "scheduler":
            raise ConfigError("there is no noise scheduler to replace; pipe.scheduler() draws many requests together.")
        if name in READ_ONLY:
            raise ConfigError(f"{name} cannot be assigned; {READ_ONLY[name].format(name=name, value=value)}.")
        if name == "max_batch":
            check_counts("a call", MAX_IMAGES, max_batch=value)
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
