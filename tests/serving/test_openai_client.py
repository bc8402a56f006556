"""The official `openai` client: synchronous, asynchronous and streaming; every picture is that of the pipeline."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import io
import json
import re
import types
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from commands import call
from PIL import Image
from running_server import PROMPT, RunningServer, run_server
from torch import Tensor

from underdraw import Pipeline
from underdraw.models.family import ImageSize, SizeRange
from underdraw.protocols import ImageTokenizer
from underdraw.serving.drawing import build_request
from underdraw.serving.errors import ApiError
from underdraw.serving.schemas import DrawingOptions

GENERATE = "/v1/images/generations"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def pipe(served_model: Path) -> Pipeline:
    return Pipeline.from_pretrained(served_model, tree="none")


def picture(encoded: str | None) -> Image.Image:
    assert encoded is not None
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def pixels(encoded: str | None) -> np.ndarray:
    return np.asarray(picture(encoded).convert("RGB"))


def test_pictures_are_those_of_the_command(client: openai.OpenAI, served_model: Path, tmp_path: Path) -> None:
    answer = client.images.generate(prompt=PROMPT, n=2, extra_body={"seed": 5})
    assert answer.data is not None and len(answer.data) == 2
    assert answer.size == "12x12" and answer.output_format == "png" and answer.background == "opaque"
    for index, item in enumerate(answer.data):
        file = tmp_path / f"{index}.png"
        done = call("generate", PROMPT, "--model", served_model, "--seed", 5 + index, "-o", file, "--tree", "none")
        assert done.code == 0
        assert np.array_equal(pixels(item.b64_json), np.asarray(Image.open(file)))


def test_metadata_draws_the_picture_again(client: openai.OpenAI, pipe: Pipeline) -> None:
    """A seed that the server chose is in the PNG, and no folder of the server is."""
    answer = client.images.generate(prompt=PROMPT, extra_body={"temperature": 1.5, "guidance_scale": 3})
    assert answer.data is not None
    chunks = picture(answer.data[0].b64_json).text  # type: ignore[attr-defined]
    settings = json.loads(chunks["settings"])
    assert chunks["model"] == "served" and "/" not in chunks["settings"]
    again = pipe(
        chunks["prompt"],
        seed=int(chunks["seed"]),
        temperature=settings["temperature"],
        guidance_scale=settings["guidance"],
    )
    assert settings["temperature"] == 1.5 and settings["guidance"] == 3
    assert np.array_equal(np.asarray(again.images[0]), pixels(answer.data[0].b64_json))


def test_usage_counts_tokens(client: openai.OpenAI) -> None:
    usage = client.images.generate(prompt="red fox", n=3, extra_body={"seed": 0}).usage
    assert usage is not None and usage.output_tokens == 3 * 36
    assert usage.input_tokens == usage.input_tokens_details.text_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    longer = client.images.generate(prompt="red fox red fox", n=1).usage
    assert longer is not None and longer.input_tokens > usage.input_tokens


def test_formats(client: openai.OpenAI) -> None:
    for name in ("jpeg", "webp"):
        answer = client.images.generate(prompt=PROMPT, output_format=name, output_compression=50)  # type: ignore[call-overload]
        assert answer.output_format == name
        assert picture(answer.data[0].b64_json).format == name.upper()
    answer = client.images.generate(prompt=PROMPT, response_format="url")
    assert answer.data is not None and answer.data[0].b64_json is None
    assert (answer.data[0].url or "").startswith("data:image/png;base64,")


def test_ignored_fields_are_accepted(client: openai.OpenAI) -> None:
    answer = client.images.generate(
        prompt=PROMPT, model="served", size="12x12", quality="high", style="vivid", user="somebody", moderation="low"
    )
    assert answer.data is not None and answer.quality == "high"


def test_stream_has_partial_images_and_the_picture(client: openai.OpenAI, pipe: Pipeline) -> None:
    stream = client.images.generate(prompt=PROMPT, stream=True, partial_images=3, extra_body={"seed": 7})
    *partials, last = list(stream)
    assert [event.type for event in partials] == ["image_generation.partial_image"] * len(partials)
    assert [event.partial_image_index for event in partials] == list(range(len(partials)))  # type: ignore[union-attr]
    assert 1 <= len(partials) <= 3
    assert last.type == "image_generation.completed" and last.usage.output_tokens == 36
    final = np.asarray(pipe(PROMPT, seed=7).images[0])
    assert np.array_equal(pixels(last.b64_json), final)
    for event in partials:
        cells = event.underdraw["cells"]  # type: ignore[union-attr]
        assert 0 < cells < 36
        shown = pixels(event.b64_json)
        # The cells that have no token yet are one flat colour; those that have one are not.
        assert len(np.unique(shown[2 * (cells // 6) + 2 :].reshape(-1, 3), axis=0)) <= 1
        assert len(np.unique(shown[: 2 * (cells // 6)].reshape(-1, 3), axis=0)) != 1


def test_stream_of_several_images(client: openai.OpenAI, pipe: Pipeline) -> None:
    stream = client.images.generate(prompt=PROMPT, stream=True, n=3, partial_images=2, extra_body={"seed": 20})
    events, partials = {}, {0: [], 1: [], 2: []}  # type: ignore[var-annotated]
    for event in stream:
        image = event.underdraw["image"]  # type: ignore[union-attr]
        if event.type == "image_generation.completed":
            events[image] = event
        else:
            partials[image].append(event.partial_image_index)
    assert sorted(events) == [0, 1, 2]
    assert all(indices == list(range(len(indices))) for indices in partials.values()) and any(partials.values())
    for index, event in events.items():
        assert np.array_equal(pixels(event.b64_json), np.asarray(pipe(PROMPT, seed=20 + index).images[0]))


def test_asynchronous_clients_get_their_own_pictures(server: RunningServer, pipe: Pipeline) -> None:
    async def draw_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            trees = ("auto", "none", "chain:depth=2")
            calls = [
                client.images.generate(
                    prompt=PROMPT, extra_body={"seed": 40 + index, "temperature": index / 4, "tree": trees[index % 3]}
                )
                for index in range(9)
            ]
            answers = await asyncio.gather(*calls)
            return [answer.data[0].b64_json for answer in answers if answer.data]

    for index, encoded in enumerate(asyncio.run(draw_all())):
        expected = pipe(PROMPT, seed=40 + index, temperature=index / 4).images[0]
        assert np.array_equal(pixels(encoded), np.asarray(expected)), index


def test_answers_have_the_types_of_the_client(client: openai.OpenAI) -> None:
    """The client itself reads any value; programs that check answers against its types must read them too."""
    for options in ({}, {"quality": "auto"}, {"quality": "standard"}, {"quality": "xhigh", "output_format": "webp"}):
        answer = client.images.generate(prompt=PROMPT, **options)  # type: ignore[call-overload]
        type(answer).model_validate(answer.to_dict(), strict=True)
        for event in client.images.generate(prompt=PROMPT, stream=True, partial_images=1, **options):  # type: ignore[call-overload]
            type(event).model_validate(event.to_dict(), strict=True)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["served"]
    assert client.models.retrieve("served").owned_by == "underdraw"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"size": "1024x1024"}, "size"),
        ({"size": "large"}, "size"),
        ({"quality": "best"}, "quality"),
        ({"background": "transparent"}, "background"),
        ({"output_format": "gif"}, "output_format"),
        ({"n": 11}, "n"),
        ({"partial_images": 4}, "partial_images"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"guidence": 3}, "guidence"),
        ({"seed": 2**62}, "seed"),
        ({"seed": 2**62 - 1, "n": 2}, "seed"),
        ({"tree": "oak"}, "tree"),
        ({"tree": ""}, "tree"),
        ({"tree": "none:depth=3"}, "tree"),
        ({"tree": "auto:depth=3"}, "tree"),
        ({"tree": "static:shape=/etc/hostname"}, "tree"),
        ({"tree": "chain:depth=1000"}, "tree"),
        ({"prompt": " "}, "prompt"),
        ({"prompt": "fox " * 1000}, "prompt"),
        ({"negative_prompt": "fox " * 1000}, "negative_prompt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_unknown_values_are_refused_with_param(client: openai.OpenAI, body: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, extra_body=body)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.request_id and "/etc" not in str(caught.value)


def test_largest_seed_is_that_of_the_command(client: openai.OpenAI, pipe: Pipeline) -> None:
    answer = client.images.generate(prompt=PROMPT, extra_body={"seed": 2**62 - 1, "tree": " auto "})
    assert answer.data is not None
    assert np.array_equal(pixels(answer.data[0].b64_json), np.asarray(pipe(PROMPT, seed=2**62 - 1).images[0]))


def test_unknown_model_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt=PROMPT, model="dall-e-3")
    assert caught.value.param == "model" and caught.value.code == "model_not_found"


class PromptedTokenizer:
    """The image tokenizer of a model, as if its decoder read the prompt; only whole images are decoded."""

    def __init__(self, tokenizer: ImageTokenizer) -> None:
        self.tokenizer, self.downsample, self.codebook = tokenizer, tokenizer.downsample, tokenizer.codebook

    def check_available(self) -> None: ...

    def encode(self, pixels: Tensor) -> Tensor:
        return self.tokenizer.encode(pixels)

    def decode(self, codes: Tensor) -> Tensor:
        raise AssertionError("the decoder needs the prompt")

    def decode_prompted(self, codes: Tensor, prompt: str, seed: int) -> Tensor:
        return self.tokenizer.decode(codes)


def test_decoder_that_needs_all_codes_sends_no_partial_images(served_model: Path, pipe: Pipeline) -> None:
    """The page then shows a colour for each code, and the picture at the end."""
    prompted = Pipeline.from_pretrained(served_model, drafter="jacobi", tree="none")
    tokenizer = PromptedTokenizer(prompted.model.image_tokenizer)
    prompted.model = dataclasses.replace(prompted.model, image_tokenizer=tokenizer)
    with run_server(prompted) as running:
        body = {"prompt": PROMPT, "seed": 3}
        events = httpx.post(running.url + GENERATE, json={**body, "stream": True, "partial_images": 3}).text
        drawn = httpx.post(f"{running.url}/draw", json=body).text
    assert "partial_image" not in events and "event: preview" not in drawn
    assert len(set(re.findall(r'"colours":"(\w+)"', drawn))) > 5
    final = json.loads(re.findall(r"event: image_generation.completed\ndata: (.*)", events)[0])["b64_json"]
    assert np.array_equal(pixels(final), np.asarray(pipe(PROMPT, seed=3).images[0]))


def test_refused_size_names_all_that_the_model_has(pipe: Pipeline) -> None:
    engine: Any = types.SimpleNamespace(pipe=copy.copy(pipe))
    engine.pipe.model = dataclasses.replace(pipe.model, requires_size=True, size_range=SizeRange(4, 64))
    cases = {"16x18": "16x18 is not one of this model's: 12x12, or any multiples of 4 up to 64.", None: "is missing: "}
    for size, words in cases.items():
        with pytest.raises(ApiError) as caught:
            build_request(engine, DrawingOptions(prompt=PROMPT, size=size))
        assert caught.value.param == "size" and caught.value.message.startswith(f"size {words}")
    assert build_request(engine, DrawingOptions(prompt=PROMPT, size="16x20")).size == ImageSize(20, 16)
