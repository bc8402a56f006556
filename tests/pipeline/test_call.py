"""The pipeline's call: diffusers' argument names, seeds, callbacks, interruption and kinds of output."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
import torch

from underdraw import Pipeline, PipelineOutput
from underdraw.errors import CapacityError, ConfigError, UnderdrawError
from underdraw.history import StepResult
from underdraw.policies.adjacency import Adjacency
from underdraw.verifiers.exact import Exact


def same(one: PipelineOutput, other: PipelineOutput) -> bool:
    return [i.tobytes() for i in one.images] == [i.tobytes() for i in other.images]


def test_words_to_a_picture(small_model: Path) -> None:
    out = Pipeline.from_pretrained(small_model)("a red fox")
    assert isinstance(out, PipelineOutput) and out.complete
    assert out.images[0].size == (small_checkpoint.PIXELS, small_checkpoint.PIXELS)
    assert out.stats.tokens == small_checkpoint.TOKENS and out.stats.passes == out.history.passes
    assert out.stats.tokens_per_pass == pytest.approx(out.history.tokens_per_pass)
    assert out.stats.seconds > 0 and math.isfinite(out.stats.mean_depth)


def test_names_as_in_diffusers(pipe: Pipeline) -> None:
    out = pipe(
        prompt=["a red fox", "a house"], negative_prompt="blue", height=small_checkpoint.PIXELS,
        width=small_checkpoint.PIXELS,
        guidance_scale=2.0, num_images_per_prompt=2, generator=torch.Generator().manual_seed(5), output_type="pil",
        callback_on_step_end=lambda pipe, index, cell, known: known,
    )  # fmt: skip
    assert len(out.images) == 4 and out.prompts == ["a red fox", "a red fox", "a house", "a house"]
    assert out.seeds == [5, 6, 7, 8]
    without = pipe("a red fox", seed=5, guidance_scale=2.0)
    assert without.images[0].tobytes() != out.images[0].tobytes()  # the negative prompt has an effect


def test_a_generator_stands_for_its_seed(pipe: Pipeline) -> None:
    made = [torch.Generator().manual_seed(seed) for seed in (11, 3)]
    assert same(pipe(["fox", "tree"], generator=made), pipe(["fox", "tree"], seed=[11, 3]))
    assert same(pipe("fox", generator=made[0]), pipe("fox", seed=np.int64(11)))  # type: ignore[arg-type]


def test_without_a_seed_two_calls_differ(pipe: Pipeline) -> None:
    first, second = pipe("fox"), pipe("fox")
    assert first.seeds != second.seeds and not same(first, second)
    assert same(first, pipe("fox", seed=first.seeds))


def test_kinds_of_output(pipe: Pipeline) -> None:
    side = small_checkpoint.PIXELS
    pil, array, tensor, codes = (
        pipe(["fox", "tree"], seed=1, output_type=kind).images  # type: ignore[arg-type]
        for kind in ("pil", "np", "pt", "codes")
    )
    assert array.shape == (2, side, side, 3) and tensor.shape == (2, 3, side, side) and codes.shape[1:] == (6, 6)
    assert np.array_equal((array * 255).round().astype(np.uint8), np.stack([np.asarray(image) for image in pil]))
    assert np.array_equal(tensor.permute(0, 2, 3, 1).numpy(), array)
    assert codes.min() >= 0 and codes.max() < small_checkpoint.IMAGES.codes


def test_callbacks_see_every_pass(pipe: Pipeline) -> None:
    ours, seen = pipe, list[tuple[int, StepResult]]()

    def note(pipe: Pipeline, index: int, cell: int, known: dict[str, Any]) -> None:
        assert pipe is ours and known["step"].start == cell and known["history"].passes == index + 1
        seen.append((index, known["step"]))

    out = pipe(["fox", "tree"], seed=1, callback_on_step_end=note)
    assert len(seen) == sum(history.passes for history in out.histories)
    for image, history in enumerate(out.histories):
        tokens = [token for _, step in seen if step.sequence == image for token in step.tokens]
        assert tokens == history.tokens[1:].tolist()


def test_interruption(pipe: Pipeline) -> None:
    def stop(pipe: Pipeline, index: int, cell: int, known: dict[str, Any]) -> None:
        if index == 4:
            pipe.interrupt()

    whole = pipe("fox", seed=1)
    out = pipe("fox", seed=1, callback_on_step_end=stop)
    assert not out.complete and out.stats.passes == 5
    drawn = out.history.grid("tokens") >= 0
    assert 0 < drawn.sum() < small_checkpoint.SIDE**2
    assert np.array_equal(out.history.grid("tokens")[drawn], whole.history.grid("tokens")[drawn])
    assert np.asarray(out.images[0])[-1].min() == 255  # what is not drawn stays blank
    assert same(pipe("fox", seed=1), whole)  # the next call is not interrupted


def test_too_little_memory_is_one_sentence(pipe: Pipeline) -> None:
    def full(pipe: Pipeline, index: int, cell: int, known: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")

    with pytest.raises(CapacityError, match="2 images at once do not fit into the memory of cpu"):
        pipe(["fox", "tree"], callback_on_step_end=full)


def test_parts_can_be_set_any_time(pipe: Pipeline) -> None:
    pipe.tree = "adjacency:init=both,nodes=16"
    assert isinstance(pipe.tree, Adjacency) and pipe.tree.init == "both"
    named = pipe("fox", seed=2)
    pipe.tree = Adjacency(init="both", nodes=16)
    assert named.history.depth.tolist() == pipe("fox", seed=2).history.depth.tolist()
    pipe.verifier = "rejection"
    assert not same(pipe("fox", seed=2), named)
    pipe.verifier = "lantern:delta=0.2"
    assert pipe("fox", seed=2).complete  # bound to the model's own codebook
    pipe.verifier = Exact()
    assert same(pipe("fox", seed=2), named)


def test_another_type(pipe: Pipeline) -> None:
    pipe.verifier = "lantern"
    moved = pipe.to("cpu", "bfloat16")
    assert moved is pipe and pipe.dtype == torch.bfloat16 and str(pipe.device) == "cpu"
    assert pipe("fox", seed=1).complete


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": []}, "list of prompts is empty"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": ["fox", "  "]}, "is empty"),
        ({"prompt": [3]}, "must be text, not int"),
        ({"negative_prompt": 3}, "must be text or a list of texts, not int"),
        ({"num_images_per_prompt": 0}, "at least 1"),
        ({"seed": [1, 2]}, "2 seeds came with 1 images"),
        ({"seed": -1}, "seed -1"),
        ({"seed": [0.5]}, "seed 0.5"),
        ({"seed": 1, "generator": torch.Generator()}, "use one of them"),
        ({"output_type": "jpeg"}, "pil, np, pt or codes"),
        ({"temperature": -1}, "temperature"),
        ({"guidance_scale": float("nan")}, "guidance"),
        ({"top_p": 0}, "top_p"),
        ({"height": 7}, "cannot generate 7x12"),
    ],
)
def test_bad_calls(pipe: Pipeline, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        pipe(**{"prompt": "fox", **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "no-such"}, "there is no model"),
        ({"device": "gpu"}, "unknown device"),
        ({"dtype": "int3"}, "unknown dtype"),
        ({"tree": "bush"}, "unknown policy"),
        ({"verifier": "maybe"}, "unknown verifier"),
        ({"drafter": "someone"}, "there is no drafter"),
    ],
)
def test_bad_parts(small_model: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UnderdrawError, match=says):
        Pipeline.from_pretrained(**{"model": small_model, **arguments})
