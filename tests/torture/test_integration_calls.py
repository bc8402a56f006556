"""Calls through other libraries with values of wrong types: transformers' `custom_generate`, diffusers, ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint_writers
import pytest
import torch
from comfy_stub import ComfyStub

from torture.checks import refusal, run_cases
from torture.mutations import SEED, case_random
from torture.test_python_calls import VALUES
from underdraw import Pipeline
from underdraw.errors import ConfigError
from underdraw.integrations.transformers import custom_generate

CASES, CI_CASES = 120, 24
IDS = torch.tensor([[1, 20, 21, 22, 3, 46, 39, 46, 5]])
ARGUMENTS = ("input_ids", "attention_mask", "drafter", "tree", "seed", "image_size", "guidance")
HOSTILE: dict[str, Any] = {
    **VALUES, "negative ids": -IDS, "large ids": IDS + 10**6, "no ids": IDS[:, :0], "float ids": IDS.float(),
    "three dimensions": IDS[None], "hidden": torch.zeros_like(IDS), "sides": (4, 4), "huge sides": (10**9, 10**9),
    "a side of 0": (0, 4), "three sides": (4, 4, 4), "float sides": (4.0, 4.0), "2**62": 2**62, "tree": "nope:x=1",
}  # fmt: skip
NODE = {
    "prompt": "fox", "negative_prompt": "", "seed": 1, "images": 1, "width": 0, "height": 0, "guidance": -1,
    "temperature": -1, "top_k": -1, "top_p": -1, "preview_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def emu3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoint_writers.write_emu3(tmp_path_factory.mktemp("emu3"))


def call_transformers(model: Any, name: str, value: Any) -> None:
    arguments = {"input_ids": IDS, "image_size": (4, 4), "tree": "none", name: value}
    config = model.generation_config
    custom_generate(model, arguments.pop("input_ids"), generation_config=config, **arguments)


def call_node(comfy: ComfyStub, model: Pipeline, name: str, value: Any) -> None:
    comfy.nodes["UnderdrawDraw"].execute(**{"model": model, **NODE, name: value})


def check_case(index: int, model: Any, comfy: ComfyStub, pipe: Pipeline) -> bool:
    rng = case_random("integration", index)
    value = rng.choice(sorted(HOSTILE))
    of_transformers = index % 2 == 0
    name = rng.choice(ARGUMENTS if of_transformers else ("model", *NODE))
    what = f"case {index} of seed {SEED}: {'custom_generate' if of_transformers else 'Draw'} with {name} {value}"
    call: Callable[[], None] = (
        partial(call_transformers, model, name, HOSTILE[value])
        if of_transformers
        else partial(call_node, comfy, pipe, name, HOSTILE[value])
    )
    message = refusal(call, what)
    if message is None:
        return True
    assert message.strip() and "\n" not in message, f"{what}: {message}"
    return False


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> ComfyStub:
    return ComfyStub().install(monkeypatch, Path(__file__).parents[2] / "integrations" / "comfyui")


def test_some_integration_calls(emu3: Any, comfy: ComfyStub, pipe: Pipeline) -> None:
    run_cases(CI_CASES, lambda index: check_case(index, emu3, comfy, pipe))


@pytest.mark.torture
def test_integration_calls(emu3: Any, comfy: ComfyStub, pipe: Pipeline) -> None:
    done = run_cases(CASES, lambda index: check_case(index, emu3, comfy, pipe))
    print(f"{CASES} integration calls of seed {SEED}: {done.count(False)} refused, {done.count(True)} done")


def test_attributes_of_the_diffusers_pipeline(emu3: Any) -> None:
    """`drafter` and `tree` of the custom pipeline reach `generate` of transformers like this."""
    options = {"custom_generate": custom_generate, "image_size": (4, 4), "do_sample": False, "max_new_tokens": 1}
    for name in ("drafter", "tree"):
        for value in (5, None, [], "nope", object()):
            with pytest.raises(ConfigError):
                emu3.generate(IDS, **options, **{name: value})
