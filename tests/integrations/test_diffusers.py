"""The custom pipeline of GLM-Image for diffusers, against `GlmImagePipeline` itself on small random weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import newer_checkpoint_writers
import pytest
import torch
from diffusers import DiffusionPipeline, GlmImagePipeline
from transformers import BatchFeature, GlmImageProcessor

from benchmarks.glm_image_pixels import write_glm_image_pixels
from underdraw.integrations import transformers as integration

FOLDER = Path(__file__).parents[2] / "integrations" / "diffusers"
SIZE = {"height": 64, "width": 96}  # 2 x 3 codes; the small grid before them has 13 x 19


class FixedPrompt(GlmImageProcessor):
    """A processor that reads every text as the same few tokens."""

    def __init__(self) -> None: ...

    def apply_chat_template(self, messages: list[Any], **_: Any) -> BatchFeature:  # type: ignore[override]
        ids = torch.tensor([[64, 80, 81, 73, 102, 103, 74, 64]]).repeat(len(messages), 1)
        grids = torch.tensor([[1, 2, 3], [1, 13, 19]]).repeat(len(messages), 1)
        count = torch.full((len(messages),), 2)
        return BatchFeature(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "image_grid_thw": grids,
                "images_per_sample": count,
            }
        )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of the diffusers pipeline, and the parts that are handed over instead of loaded."""
    folder = tmp_path_factory.mktemp("glm") / "GLM-Image"
    model = newer_checkpoint_writers.write_glm_image(folder)
    write_glm_image_pixels(folder)
    shutil.rmtree(folder / "processor")
    model.generation_config.update(eos_token_id=None, pad_token_id=76, suppress_tokens=list(range(64, 72)))
    return folder, {"vision_language_encoder": model, "processor": FixedPrompt()}


def load(parts: tuple[Path, dict[str, Any]]) -> Any:
    pipe = DiffusionPipeline.from_pretrained(parts[0], custom_pipeline=str(FOLDER), trust_remote_code=True, **parts[1])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return pipe("a fox", generator=generator, num_inference_steps=2, output_type="pt", **SIZE).images


def prior_tokens(pipe: Any, seed: int = 3) -> torch.Tensor:
    """The codes of two images, each four times."""
    generator = torch.Generator().manual_seed(seed)
    return pipe.generate_prior_tokens(["a fox", "a cat"], generator=generator, **SIZE)[0]


def test_images_are_those_of_diffusers(parts: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the most likely tokens, which do not depend on noise."""
    pipe = load(parts)
    monkeypatch.setattr(parts[1]["vision_language_encoder"].generation_config, "top_k", 1)
    reference = GlmImagePipeline(**pipe.components)
    reference.set_progress_bar_config(disable=True)
    assert isinstance(pipe, GlmImagePipeline) and type(pipe).__name__ == "UnderdrawGlmImagePipeline"
    assert torch.equal(prior_tokens(pipe), prior_tokens(reference))
    assert torch.equal(draw(pipe), draw(reference))


def test_sampled_tokens_depend_on_the_generator_alone(parts: tuple[Path, dict[str, Any]]) -> None:
    pipe = load(parts)
    pipe.tree = "none"
    plain = prior_tokens(pipe)
    pipe.tree = "chain:depth=6"
    assert plain.shape == (2, 4 * 2 * 3) and not torch.equal(plain[0], plain[1])
    assert torch.equal(plain, prior_tokens(pipe)) and not torch.equal(plain, prior_tokens(pipe, seed=4))
    assert "generate" not in vars(pipe.vision_language_encoder)  # as it was before
    assert ("auto", "chain:depth=6") in integration._WRAPPED[pipe.vision_language_encoder]._pipelines  # it was used


def test_documented_call_runs(parts: tuple[Path, dict[str, Any]]) -> None:
    """The block of docs/integrations.md, with small weights on the CPU."""
    page = (FOLDER.parents[1] / "docs" / "integrations.md").read_text()
    block = page.partition("## diffusers")[2].partition("```py\n")[2].partition("```")[0]
    replaced = {
        '"zai-org/GLM-Image"': "folder",
        '"integrations/diffusers"': repr(str(FOLDER)),
        "dtype=torch.bfloat16": "**parts",
        '.to("cuda")': "",
        'Generator("cuda")': 'Generator("cpu")',
        "height=1024, width=1024": "num_inference_steps=2, height=64, width=96",
    }
    for old, new in replaced.items():
        assert block.count(old) == 1, old
        block = block.replace(old, new)
    names: dict[str, Any] = {"folder": parts[0], "parts": parts[1]}
    exec(compile(block, "docs/integrations.md", "exec"), names)
    assert names["image"].size == (96, 64) and type(names["pipe"]).__name__ == "UnderdrawGlmImagePipeline"
