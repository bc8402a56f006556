"""Calls of the pipeline: arguments, seeds, callbacks, interruption and output types."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
import torch

from underdraw import Pipeline, PipelineOutput
from underdraw.drafters.forced import Forced
from underdraw.drafters.small_model import SmallModel
from underdraw.errors import CapacityError, ConfigError, UnderdrawError
from underdraw.history import History, StepResult


def images_equal(first: PipelineOutput[Any], second: PipelineOutput[Any]) -> bool:
    return [image.tobytes() for image in first.images] == [image.tobytes() for image in second.images]


def test_text_to_image(small_model: Path) -> None:
    out = Pipeline.from_pretrained(small_model)("a red fox")
    assert isinstance(out, PipelineOutput) and out.complete
    assert out.images[0].size == (small_checkpoint.PIXELS, small_checkpoint.PIXELS)
    assert out.stats.tokens == small_checkpoint.TOKENS and out.stats.passes == out.history.passes
    assert out.stats.tokens_per_pass == pytest.approx(out.history.tokens_per_pass)
    assert out.stats.seconds > 0 and math.isfinite(out.stats.mean_depth)


def test_argument_names_of_diffusers(pipe: Pipeline) -> None:
    out = pipe(
        prompt=["a red fox", "a house"],
        negative_prompt="blue",
        height=small_checkpoint.PIXELS,
        width=small_checkpoint.PIXELS,
        guidance_scale=2.0,
        num_images_per_prompt=2,
        generator=torch.Generator().manual_seed(5),
        output_type="pil",
        callback_on_step_end=lambda pipe, index, step, details: details,
    )
    assert len(out.images) == 4 and out.prompts == ["a red fox", "a red fox", "a house", "a house"]
    assert out.seeds == [5, 6, 7, 8]
    without = pipe("a red fox", seed=5, guidance_scale=2.0)
    assert without.images[0].tobytes() != out.images[0].tobytes(), "the negative prompt has an effect"


def test_negative_prompts_per_prompt(pipe: Pipeline) -> None:
    prompts, settings = ["a red fox", "a blue ghost"], {"guidance_scale": 2.0}
    out = pipe(prompts, negative_prompt=["blue", "red"], num_images_per_prompt=2, seed=[1, 2, 3, 4], **settings)
    for index, (prompt, negative) in enumerate(zip(prompts, ["blue", "red"], strict=True)):
        expected = pipe(prompt, negative_prompt=negative, num_images_per_prompt=2, seed=1 + 2 * index, **settings)
        assert [image.tobytes() for image in out.images[2 * index : 2 * index + 2]] == [
            image.tobytes() for image in expected.images
        ]
    assert out.settings["negative_prompt"] == ["blue", "blue", "red", "red"]
    assert '"negative_prompt": "red"' in out.metadata(3)["settings"]


def test_generator_stands_for_its_seed(pipe: Pipeline) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in (11, 3)]
    assert images_equal(pipe(["fox", "tree"], generator=generators), pipe(["fox", "tree"], seed=[11, 3]))
    assert images_equal(pipe("fox", generator=generators[0]), pipe("fox", seed=np.int64(11)))  # type: ignore[arg-type]


def test_calls_without_seed_differ(pipe: Pipeline) -> None:
    first, second = pipe("fox"), pipe("fox")
    assert first.seeds != second.seeds and not images_equal(first, second)
    assert images_equal(first, pipe("fox", seed=first.seeds))


def test_output_types(pipe: Pipeline) -> None:
    side = small_checkpoint.PIXELS
    pil, array, tensor, codes = (
        pipe(["fox", "tree"], seed=1, output_type=kind).images  # type: ignore[call-overload]
        for kind in ("pil", "np", "pt", "codes")
    )
    assert array.shape == (2, side, side, 3) and tensor.shape == (2, 3, side, side) and codes.shape[1:] == (6, 6)
    assert np.array_equal((array * 255).round().astype(np.uint8), np.stack([np.asarray(image) for image in pil]))
    assert np.array_equal(tensor.permute(0, 2, 3, 1).numpy(), array)
    assert codes.min() >= 0 and codes.max() < small_checkpoint.IMAGES.codes


def test_request_is_reusable(pipe: Pipeline) -> None:
    """One validated request gives the image of a call, without speculation too, and its steps can be streamed."""
    request = pipe.request("a red fox", seed=4, temperature=0.7)
    out = pipe.generate(request)
    assert images_equal(out, pipe("a red fox", seed=4, temperature=0.7))
    assert images_equal(out, pipe.plain().generate(request))
    assert out.settings == pipe.settings(request) and out.settings["temperature"] == 0.7
    history = History(pipe.model.make_layout(request.size))
    steps = list(pipe.stream(request, [history]))
    assert history.tokens.tolist() == out.history.tokens.tolist() and len(steps) == out.stats.passes
    assert pipe.decode_images([history])[0].tobytes() == out.images[0].tobytes()


def test_drafter_of_one_call(pipe: Pipeline) -> None:
    pipe.drafter = SmallModel(pipe.model.target)
    request = pipe.request("a red fox", seed=4)
    out = pipe.generate(request, drafter=Forced())
    assert out.stats.passes == small_checkpoint.TOKENS, "the drafter of this call proposes nothing"
    assert pipe.generate(request).stats.passes == -(-small_checkpoint.TOKENS // 3), "the target drafts what it samples"


def test_callback_sees_every_pass(pipe: Pipeline) -> None:
    steps = list[StepResult]()

    def record(caller: Pipeline, index: int, start: int, details: dict[str, Any]) -> None:
        assert caller is pipe and details["step"].start == start and details["history"].passes == index + 1
        steps.append(details["step"])

    out = pipe(["fox", "tree"], seed=1, callback_on_step_end=record)
    assert len(steps) == sum(history.passes for history in out.histories)
    for image, history in enumerate(out.histories):
        tokens = [token for step in steps if step.sequence == image for token in step.tokens]
        assert tokens == history.tokens[1:].tolist()


def test_interrupt_ends_a_call_and_leaves_cells_grey(pipe: Pipeline) -> None:
    def stop(pipe: Pipeline, index: int, step: int, details: dict[str, Any]) -> None:
        if index == 4:
            pipe.interrupt()

    complete = pipe("fox", seed=1)
    out = pipe("fox", seed=1, callback_on_step_end=stop)
    assert not out.complete and out.stats.passes == 5
    has_token = out.history.grid("tokens") >= 0
    assert 0 < has_token.sum() < small_checkpoint.SIDE**2
    assert np.array_equal(out.history.grid("tokens")[has_token], complete.history.grid("tokens")[has_token])
    assert set(np.asarray(out.images[0])[-1].flatten().tolist()) == {128}
    assert images_equal(pipe("fox", seed=1), complete), "the next call is not interrupted"


def test_out_of_memory_is_a_capacity_error(pipe: Pipeline) -> None:
    def fail(pipe: Pipeline, index: int, step: int, details: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")

    with pytest.raises(CapacityError, match="2 images at once do not fit into the memory of cpu"):
        pipe(["fox", "tree"], callback_on_step_end=fail)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "list of prompts is empty"),
        ({"prompt": None}, "must be text or a list of texts, not NoneType"),
        ({"prompt": 3}, "must be text or a list of texts, not int"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": ["fox", "  "]}, "is empty"),
        ({"prompt": [3]}, "must be text, not int"),
        ({"negative_prompt": 3}, "must be text or a list of texts, not int"),
        ({"negative_prompt": ["red", 3]}, "must be text, not int"),
        ({"negative_prompt": ["red", "blue"]}, "2 negative prompts were passed with 1 prompts"),
        ({"num_images_per_prompt": 0}, "at least 1"),
        ({"num_images_per_prompt": 1.5}, "num_images_per_prompt 1.5 is not a whole number"),
        ({"seed": [1, 2]}, "2 seeds came with 1 images"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 1.5}, "seed 1.5 is not allowed; use a whole number"),
        ({"seed": "7"}, "seed '7' is not allowed; use a whole number"),
        ({"seed": [0.5]}, "seed 0.5"),
        ({"seed": torch.tensor(7)}, r"seed tensor\(7\) is not allowed; use a whole number"),
        ({"seed": 1, "generator": torch.Generator()}, "use one of them"),
        ({"generator": [3]}, "must be a torch.Generator or a list of them, not int"),
        ({"generator": 3}, "must be a torch.Generator or a list of them, not int"),
        ({"output_type": "jpeg"}, "pil, np, pt or codes"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature 'hot' is not a number"),
        ({"guidance_scale": float("nan")}, "guidance"),
        ({"guidance_scale": "7"}, "guidance '7' is not a number"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 2.5}, "top_k 2.5 is not a whole number"),
        ({"height": 7}, "cannot generate 7x12"),
        ({"generator": [torch.Generator()] * 2}, "2 generators came with 1 images; pass one generator"),
        ({"num_inference_steps": 50}, "unknown option of a call 'num_inference_steps'. Codes are drawn"),
        ({"tree": "none"}, "unknown option of a call 'tree'. Set it before the call: pipe.tree = 'none'."),
        ({"guidance": 2}, "Did you mean 'guidance_scale'?.* Allowed: callback_on_step_end"),
        ({"do_sample": False}, "temperature=0 is greedy"),
    ],
)
def test_bad_arguments(pipe: Pipeline, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe(**{"prompt": "fox", **arguments})


def test_numbers_of_numpy_can_be_saved(pipe: Pipeline) -> None:
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(9), "guidance_scale": np.float16(2)}
    settings = pipe.settings(pipe.request("fox", top_p=np.float32(0.5), **numbers))
    saved = json.loads(json.dumps(settings))
    assert [saved[name] for name in ("temperature", "top_k", "guidance", "top_p")] == [0.5, 9, 2, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": 2}, "unknown option of request 'guidance'. Did you mean 'guidance_scale'?"),
        ({"output_type": "np"}, r"unknown option of request 'output_type'. Pass it to generate\(\)"),
        ({"tree": "none"}, "Set it before the call: pipe.tree = 'none'."),
    ],
)
def test_bad_options_of_a_request(pipe: Pipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe.request("fox", **options)


def test_bad_arguments_of_generate_and_stream(pipe: Pipeline) -> None:
    request = pipe.request("fox", seed=1)
    histories = [History(pipe.model.make_layout(request.size))]
    for draw in (pipe.generate, lambda value: pipe.stream(value, histories)):
        with pytest.raises(ConfigError, match=r"a request is needed, not 'fox'; make one with pipe.request\(PROMPT"):
            draw("fox")  # type: ignore[operator]
    for drafter in ("jacobi", Forced):
        with pytest.raises(
            ConfigError, match=r"the drafter of a call is an object, not .*; names are for pipe\.drafter"
        ):
            pipe.generate(request, drafter=drafter)  # type: ignore[arg-type]
    for draw_kept in (
        lambda mode: pipe.generate(request, token_stats=mode),
        lambda mode: pipe.scheduler(token_stats=mode),
    ):
        with pytest.raises(ConfigError, match=r"unknown token_stats 'kept'\. Did you mean 'keep'"):
            draw_kept("kept")


def test_bad_histories_are_not_decoded(pipe: Pipeline) -> None:
    out = pipe("fox", seed=1)
    for value, message in (
        (out.history, r"a list of histories is needed, not History\("),
        ([], "no histories to decode"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipe.decode_images(value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pil, np, pt or codes"):
        pipe.decode_images(out.histories, "jpeg")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "no-such"}, "there is no model"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"dtype": "int3"}, "unknown dtype 'int3'"),
        ({"dtype": "float32", "torch_dtype": torch.bfloat16}, "dtype float32 and torch_dtype torch.bfloat16 differ"),
        ({"variant": "fp16"}, "unknown option of from_pretrained 'variant'. Use dtype.* Allowed: cache_dir.*weights"),
        ({"load_in_8bit": True}, 'Use weights="int8"'),
        ({"drafter": "none"}, "there is no drafter 'none'; the tree 'none'"),
        ({"tree": None}, "there is no tree None; the tree 'none'"),
        ({"tree": "bush"}, "unknown policy"),
        ({"verifier": "maybe"}, "unknown verifier"),
        ({"drafter": "someone"}, "there is no drafter"),
    ],
)
def test_bad_from_pretrained(small_model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnderdrawError, match=message):
        Pipeline.from_pretrained(**{"model": small_model, **arguments})


def test_pipeline_of_a_name_or_of_another_model() -> None:
    for value, message in (("tiny", r"not str; .*\('tiny'\)"), (torch.nn.Identity(), r"not Identity; .*\(MODEL\)")):
        with pytest.raises(ConfigError, match=f"a loaded model, {message}"):
            Pipeline(value)  # type: ignore[arg-type]


def test_float16_on_a_cpu_warns(small_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    Pipeline.from_pretrained(small_model, torch_dtype=torch.float16, device="cpu")
    assert "many times slower than float32" in caplog.text
