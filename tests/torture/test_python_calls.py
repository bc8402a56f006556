"""Python calls with arguments of wrong types: they work, or raise an UnderdrawError and change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torture.checks import refusal, run_cases
from torture.mutations import SEED, case_random
from underdraw import Pipeline
from underdraw.errors import ConfigError, UnderdrawError

CASES, CI_CASES = 240, 40
VALUES: dict[str, Any] = {
    "None": None, "True": True, "False": False, "0": 0, "-1": -1, "1.0": 1.0, "nan": float("nan"), "inf": float("inf"),
    "huge": 10**30, "complex": 1j, "text": "x", "empty text": "", "bytes": b"x", "list": [], "nested": [[1]],
    "dict": {}, "dict of text": {"a": 1}, "set": {1}, "object": object(), "class": int, "function": len,
    "lambda": lambda: 1,
    "array": np.zeros(3), "scalar": np.float32(1.5), "numpy nan": np.float64("nan"), "tensor": torch.zeros(2),
    "generator": torch.Generator(), "path": Path("x"), "range": range(3), "slice": slice(3), "ellipsis": ...,
    "texts": ["a", 1], "None in a list": [None], "surrogate": "\ud800", "NUL": "a\0b", "iterator": iter([1, 2]),
    "dtype": torch.float16, "int dtype": torch.int32, "device": torch.device("meta"), "module": torch.nn.Linear(1, 1),
}  # fmt: skip
REQUEST = (
    "negative_prompt", "height", "width", "guidance_scale", "temperature", "top_k", "top_p", "num_images_per_prompt",
    "seed", "generator", "output_type", "callback_on_step_end", "token_stats",
)  # fmt: skip
PARTS = ("drafter", "tree", "verifier", "proposal")
LOADING = (*PARTS, "dtype", "torch_dtype", "device", "compile", "numerics", "revision", "token", "cache_dir", "laws")
Action = Callable[[Pipeline, Any], object]
ACTIONS: dict[str, Action] = {
    "prompt": lambda pipe, value: pipe(value),
    **{name: lambda pipe, value, name=name: pipe("fox", **{name: value}) for name in REQUEST},  # type: ignore[misc]
    **{f"set {name}": lambda pipe, value, name=name: setattr(pipe, name, value) for name in PARTS},  # type: ignore[misc]
    **{
        f"load with {name}": lambda pipe, value, name=name: Pipeline.from_pretrained(pipe.model.path, **{name: value})  # type: ignore[misc]
        for name in LOADING
    },
    "load": lambda pipe, value: Pipeline.from_pretrained(value),
    "to": lambda pipe, value: pipe.to(value),
    "to dtype": lambda pipe, value: pipe.to("cpu", value),
    "generate": lambda pipe, value: pipe.generate(value),
    "unknown option": lambda pipe, value: pipe("fox", laws=value),
    "save": lambda pipe, value: pipe("fox", seed=1).save(value),
    "heatmap": lambda pipe, value: pipe("fox", seed=1).heatmap(value),
    "save_pretrained": lambda pipe, value: pipe.save_pretrained(value),
}
HARMLESS = ("load with cache_dir", "load")  # would look for a repository on the hub for some texts


def check_case(index: int, small_model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    rng = case_random("python", index)
    names = sorted(ACTIONS)
    action, value = names[index % len(names)], rng.choice(sorted(VALUES))
    here.mkdir()
    monkeypatch.chdir(here)
    pipe = Pipeline.from_pretrained(small_model, tree="chain:depth=2")
    before = repr(pipe), pipe.proposal, pipe.dtype
    what = f"case {index} of seed {SEED}: {action} with {value}"
    message = refusal(lambda: ACTIONS[action](pipe, VALUES[value]), what)
    if message is None:
        return True
    assert message.strip(), what
    assert (repr(pipe), pipe.proposal, pipe.dtype) == before, f"{what} failed and changed the pipeline"
    assert not list(here.iterdir()), f"{what} failed and left {list(here.iterdir())}"
    return False


def test_some_python_calls(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cases(CI_CASES, lambda index: check_case(index, small_model, tmp_path / str(index), monkeypatch))


@pytest.mark.torture
def test_python_calls(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked = run_cases(CASES, lambda index: check_case(index, small_model, tmp_path / str(index), monkeypatch))
    print(f"{CASES} Python calls of seed {SEED}: {worked.count(False)} refused, {worked.count(True)} done")


def test_a_failed_assignment_changes_nothing(pipe: Pipeline) -> None:
    expected = pipe("fox", seed=1).images[0].tobytes()
    before = repr(pipe), pipe.proposal
    for name in ("tree", "drafter", "verifier", "proposal"):
        for value in ("nope", "nope:x=1", 5, None, [], object):
            with pytest.raises(UnderdrawError):
                setattr(pipe, name, value)
            assert (repr(pipe), pipe.proposal) == before
    assert pipe("fox", seed=1).images[0].tobytes() == expected


def test_interrupt_ends_the_call_of_its_own_thread(small_model: Path) -> None:
    pipe = Pipeline.from_pretrained(small_model, tree="none")
    stopped, outputs = threading.Event(), {}

    def draw(name: str) -> None:
        def on_step(pipe: Pipeline, index: int, step: int, details: Any) -> None:
            if name == "stopped" and index == 3:
                pipe.interrupt()
                stopped.set()
            elif name == "other" and index == 1:
                stopped.wait(60)

        outputs[name] = pipe("fox", seed=1, callback_on_step_end=on_step)

    threads = [threading.Thread(target=draw, args=(name,)) for name in ("other", "stopped")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outputs["other"].complete and not outputs["stopped"].complete


@pytest.mark.parametrize(
    "values", [{"top_k": float("nan")}, {"seed": 1.0}, {"laws": "x"}, {"token_stats": "x"}], ids=str
)
def test_values_that_once_went_wrong(pipe: Pipeline, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        pipe("fox", **values)
