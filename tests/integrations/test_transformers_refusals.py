"""What `custom_generate` of transformers refuses: settings, prompts and weights that it would ignore or misread."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers_inputs import IMAGE_START, emu3_inputs, glm_inputs, janus_inputs

from underdraw.errors import ConfigError, UnsupportedError
from underdraw.integrations.transformers import custom_generate

HUB = str(Path(__file__).parents[2] / "integrations" / "hub")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_scale": 3.0}, "guidance 3 was given, but this model has no guidance"),
        ({"guidance": 1.5}, "guidance 1.5 was given, but this model has no guidance"),
        ({"suppress_tokens": [7, 63, 64]}, "SuppressTokensLogitsProcessor forbids 2 of 64 codes"),
        ({"prefix_allowed_tokens_fn": lambda *_: [1, 2, 3]}, "PrefixConstrained.* forbids 61 of 64 codes"),
        ({"image_grid_thw": torch.tensor([[1, 2, 3], [1, 13, 19], [1, 3, 2], [1, 19, 13]])}, "of one size for all"),
        ({"image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 3]])}, "a large and a small grid"),  # of an edited image
    ],
)
def test_settings_that_would_be_ignored_are_refused(glm_image: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        glm_image.generate(**{**glm_inputs(), **changes}, custom_generate=custom_generate)


def test_condition_images_are_refused(janus: Any) -> None:
    """Raw, and encoded as transformers hands them over."""
    config = janus.generation_config
    for images in ({"pixel_values": torch.zeros(1)}, {"mm_encoder_outputs": {"image": torch.zeros(1)}}):
        with pytest.raises(UnsupportedError, match="cannot see images; leave pixel_values out"):
            custom_generate(janus, janus_inputs()["input_ids"], generation_config=config, **images)


def test_missing_image_size_is_one_sentence(emu3: Any) -> None:
    with pytest.raises(ConfigError, match=r"image_size=\(rows, columns\)"):
        emu3.generate(**emu3_inputs(), custom_generate=custom_generate, do_sample=False)


@pytest.mark.parametrize("family", ["janus", "emu3", "glm_image"])
def test_prompts_of_texts_are_refused(family: str, request: pytest.FixtureRequest) -> None:
    """As processors return them if they are not asked for an image."""
    inputs, start = {
        "janus": (janus_inputs(), IMAGE_START),
        "emu3": (emu3_inputs(), 5),
        "glm_image": (glm_inputs(), 64),
    }[family]
    inputs = {**inputs, "input_ids": inputs["input_ids"][:, :-1], "attention_mask": None}
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False}
    if family == "emu3":
        options |= {"image_size": (4, 4)}
    with pytest.raises(ConfigError, match=f"must end with token {start}, which starts an image"):
        request.getfixturevalue(family).generate(**{**inputs, **options})


def test_processors_that_would_be_ignored_are_refused(janus: Any) -> None:
    with pytest.raises(UnsupportedError, match="RepetitionPenaltyLogitsProcessor"):
        janus.generate(**janus_inputs(), custom_generate=custom_generate, repetition_penalty=1.5)
    with pytest.raises(UnsupportedError, match="num_beams 3"):  # transformers would repeat the rows
        janus.generate(**janus_inputs(), custom_generate=custom_generate, num_beams=3)


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_attentions", "output_hidden_states"])
def test_outputs_that_are_not_recorded_are_refused(janus: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"does not record what {name} asks for"):
        janus.generate(**janus_inputs(), custom_generate=custom_generate, return_dict_in_generate=True, **{name: True})
    options: dict[str, Any] = {"custom_generate": custom_generate, "tree": "none", name: True}
    assert janus.generate(**janus_inputs(), **options).shape == (2, 16)  # transformers does not return them either


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("streamer", SimpleNamespace(put=lambda _: None, end=lambda: None)),
        ("logits_processor", [lambda _, scores: scores]),
        ("negative_prompt_ids", torch.tensor([[1, 20, IMAGE_START]])),
    ],
)
def test_arguments_that_only_a_folder_sees_are_refused(janus: Any, name: str, value: Any) -> None:
    """As transformers calls it where the model's repository has the folder."""
    generate = janus.load_custom_generate(HUB, trust_remote_code=True)
    with pytest.raises(UnsupportedError, match=f"cannot apply {name} to this model"):
        generate(model=janus, **janus_inputs(), **{name: value})
    if name != "logits_processor":
        options: dict[str, Any] = {"custom_generate": HUB, "trust_remote_code": True, name: value}
        with pytest.raises(UnsupportedError, match=f"cannot apply {name} to this model"):
            janus.generate(**janus_inputs(), **options)


def test_weights_that_are_elsewhere_are_refused(janus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded, quantised and adapted models say so instead of failing over a tensor's name."""
    model = copy.deepcopy(janus)
    monkeypatch.setattr(model, "_hf_hook", SimpleNamespace(execution_device="cuda:0"), raising=False)
    with pytest.raises(UnsupportedError, match="offloaded"):
        model.generate(**janus_inputs(), custom_generate=custom_generate)
    monkeypatch.delattr(model, "_hf_hook")
    monkeypatch.setattr(model, "is_quantized", True, raising=False)
    with pytest.raises(UnsupportedError, match="quantised"):
        model.generate(**janus_inputs(), custom_generate=custom_generate)
    monkeypatch.delattr(model, "is_quantized")
    model.lm_head = torch.nn.ModuleDict({"base_layer": model.lm_head})
    with pytest.raises(UnsupportedError, match="merge_and_unload"):
        model.generate(**janus_inputs(), custom_generate=custom_generate)


def test_other_models_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=32))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel"):
        model.generate(torch.tensor([[1, 2]]), custom_generate=custom_generate, max_new_tokens=2)
