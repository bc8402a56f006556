"""GLM-Image's pixels: diffusers paints the codes that were drawn here, with their prompt and seed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import ParityCase

from benchmarks.glm_image_pixels import write_glm_image_pixels
from underdraw.errors import UnsupportedError
from underdraw.history import History
from underdraw.models.glm_image_pixels import prior_token_ids
from underdraw.pipeline import Pipeline

PROMPT_TEXT = 'a fox with the word "ice"'
SIZE = {"height": 64, "width": 96}


@pytest.fixture(scope="module")
def whole(glm_image: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with every part of the pipeline, and diffusers' pipeline without the autoregressive part."""
    pytest.importorskip("diffusers")
    folder = shutil.copytree(glm_image.path, tmp_path_factory.mktemp("whole") / "GLM-Image")
    return folder, write_glm_image_pixels(folder)


def test_each_code_becomes_four() -> None:
    """As diffusers enlarges the codes that it draws itself."""
    diffusers = pytest.importorskip("diffusers")
    codes = torch.arange(6).view(1, 2, 3)
    theirs = diffusers.GlmImagePipeline._upsample_token_ids(codes.flatten(), 2, 3)
    assert torch.equal(prior_token_ids(codes), theirs)


def test_pixels_are_those_of_diffusers(whole: tuple[Path, Any]) -> None:
    folder, reference = whole
    pipe = Pipeline.from_pretrained(folder, drafter="jacobi", tree="none", device="cpu")
    out = pipe([PROMPT_TEXT, "a cat"], seed=[3, 4], output_type="pt", **SIZE)
    codes = pipe.decode_images(out.histories, "codes")
    reference.set_progress_bar_config(disable=True)
    for index, image in enumerate(out.images):
        theirs = reference(
            out.prompts[index], prior_token_ids=prior_token_ids(codes[index : index + 1]), output_type="pt",
            generator=torch.Generator().manual_seed(out.seeds[index]), **SIZE,
        ).images[0]  # fmt: skip
        torch.testing.assert_close(image, theirs, atol=1e-5, rtol=0)
    assert not torch.equal(out.images[0], out.images[1])
    drawn = pipe(PROMPT_TEXT, seed=3, **SIZE).images[0]
    assert drawn.size == (96, 64)


def test_incomplete_images_are_blank(whole: tuple[Path, Any]) -> None:
    """Diffusion takes too long for a picture that is not complete."""
    pipe = Pipeline.from_pretrained(whole[0], drafter="jacobi", tree="none", device="cpu")
    history = History(pipe.model.make_layout(pipe.model.resolve_size(64, 96)), prompt=PROMPT_TEXT)
    history.record_first(5)
    pixels = pipe.decode_images([history], "pt")
    assert pixels.shape == (1, 3, 64, 96) and pixels.unique().numel() == 1


def test_missing_diffusers_is_an_error_before_drawing(glm_image: ParityCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    pipe = Pipeline(glm_image.model, drafter="jacobi", tree="none")
    passes: list[int] = []
    with pytest.raises(UnsupportedError, match=r"needs the package diffusers.*underdraw\[glm-image\]"):
        pipe(PROMPT_TEXT, callback_on_step_end=lambda *arguments: passes.append(1), **SIZE)
    assert not passes
