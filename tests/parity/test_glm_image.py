"""GLM-Image against transformers: prompts, positions, logits, and whole greedy images by its `generate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import parity_cases
import pytest
import torch
from parity_cases import ParityCase
from torch import Tensor

from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models import glm_image as family
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.family import ImageSize, SamplingDefaults
from underdraw.models.random_weights import model_shape
from underdraw.nn.transformer import Transformer
from underdraw.pipeline import Pipeline

PROMPT_TEXT = "a red fox"
SIZE = ImageSize(96, 160)  # 3 x 5 codes after a preview of 12 x 20


def grids(layout: Layout) -> Tensor:
    """transformers' `image_grid_thw`: the large grid, then the small one."""
    assert layout.preview is not None
    return torch.tensor([[1, layout.height, layout.width], [1, *layout.preview]])


def positions(model: Any, row: tuple[int, ...], layout: Layout) -> Tensor:
    """Positions (3, 1, N) of a prompt and its image, as transformers' `generate` would use them."""
    prompt, _ = model.model.get_rope_index(torch.tensor([row]), grids(layout), torch.tensor([2]))
    return torch.cat([prompt, model.model._cached_decode_position_ids.movedim(1, 0)], dim=-1)


def test_prompt_tokens(glm_image: ParityCase) -> None:
    """Text, both sizes with the larger first, image start; no unconditional row."""
    digit = 80 + 22  # the token of "0"
    prompt = glm_image.model.make_prompt(PROMPT_TEXT, None, SIZE)
    assert prompt.condition == (80, 81, 82, 73, digit + 3, digit + 5, 74, 73, digit + 12, digit + 20, 74, 64)
    assert prompt.unconditional is None
    with pytest.raises(ConfigError, match="no negative prompt"):
        glm_image.model.make_prompt(PROMPT_TEXT, "blue", SIZE)


def test_guidance_is_refused(glm_image: ParityCase) -> None:
    pipe = Pipeline(glm_image.model, drafter="jacobi", tree="none")
    with pytest.raises(ConfigError, match="needs an unconditional prompt, which this model does not have"):
        pipe(PROMPT_TEXT, height=64, width=64, guidance_scale=3, output_type="codes")


def test_sizes_of_the_processor() -> None:
    """Small grids as the processor of transformers computes them, and the number of generated tokens."""
    expected = {(512, 512): 513, (1024, 1024): 1281, (1152, 768): 1112, (1024, 1152): 1393, (2048, 2048): 4353}
    assert {size: family.make_layout(ImageSize(*size)).steps for size in expected} == expected
    from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

    for height, width in ((512, 512), (1152, 768), (768, 1152), (1024, 1152), (64, 2048), (2048, 96)):
        shape = GlmImageProcessor._get_target_shape(None, height, width)  # type: ignore[arg-type]
        layout = family.make_layout(ImageSize(height, width))
        assert (layout.height, layout.width, *(layout.preview or ())) == shape


@pytest.mark.parametrize("size", [SIZE, ImageSize(160, 64), ImageSize(64, 64)])
@pytest.mark.parametrize("words", [PROMPT_TEXT, "snow on the blue ice"])
def test_rotations_match_transformers(glm_image: ParityCase, size: ImageSize, words: str) -> None:
    """Cosines and sines of every position, after the unrotated angles are taken out."""
    model, rope = glm_image.model, glm_image.model.target.net.arch.rope
    layout, row = model.make_layout(size), model.make_prompt(words, None, size).condition
    assert isinstance(row, tuple)
    table = positions(glm_image.reference, row, layout)
    cos, sin = glm_image.reference.model.language_model.rotary_emb(torch.zeros(1), table)  # (1, N, 2 * angles)
    prompt = rope.prompt_rotation(len(row), torch.device("cpu"))
    image = rope.image_rotation(layout, torch.arange(layout.steps - 1)[None], torch.tensor([len(row)]))[0]
    ours, angles = torch.cat([prompt, image]), sum(rope.axes)
    theirs = torch.stack([cos, sin], dim=-2)[0, :-1, :, :angles]
    torch.testing.assert_close(ours[..., :angles], theirs, atol=1e-5, rtol=0)
    assert torch.equal(ours[:, 0, angles:], torch.ones_like(ours[:, 0, angles:])) and not ours[:, 1, angles:].any()


@torch.no_grad()
def test_logits_match_transformers(glm_image: ParityCase) -> None:
    """Over the end of the preview and the first cells of the large grid, at explicit positions."""
    model, reference = glm_image.model, glm_image.reference
    layout, prompt = model.make_layout(SIZE), model.make_prompt(PROMPT_TEXT, None, SIZE)
    tokens = torch.randint(0, 64, (layout.stop - 1,), generator=torch.Generator().manual_seed(2))
    assert len(tokens) > layout.grid_start and isinstance(prompt.condition, tuple)
    ids = torch.tensor([[*prompt.condition, *tokens.tolist()]])
    table = positions(reference, prompt.condition, layout)[..., : ids.shape[1]]
    theirs = reference(input_ids=ids, position_ids=table).logits[0, len(prompt.condition) - 1 :, :64]
    ours = chain_logits_in_parts(glm_image, prompt, layout, tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def chain_logits_in_parts(case: ParityCase, prompt: Any, layout: Layout, tokens: Tensor) -> Tensor:
    """`parity_cases.chain_logits` for chains longer than a pass: a prompt of the first tokens has other positions."""
    from underdraw.nn.transformer import causal_attention

    net = case.model.target.net
    ids = torch.tensor([[*prompt.condition, *tokens.tolist()]])
    start = len(prompt.condition)
    image = net.arch.rope.image_rotation(layout, torch.arange(len(tokens))[None], torch.tensor([start]))[0]
    rotation = torch.cat([net.arch.rope.prompt_rotation(start, torch.device("cpu")), image])[None]
    return net.logits(net(net.embed(ids), rotation, causal_attention))[0, start - 1 :]


@pytest.mark.parametrize("tree", ["none", "chain:depth=6"])
def test_greedy_images_match_transformers(glm_image: ParityCase, tree: str) -> None:
    """Both grids of whole images, drawn by transformers' loop; ids that are no codes are not allowed there."""
    model = glm_image.model
    layout, words = model.make_layout(SIZE), "snow on the blue ice"
    row = torch.tensor([model.make_prompt(words, None, SIZE).condition])
    theirs = glm_image.reference.generate(
        row, attention_mask=torch.ones_like(row), image_grid_thw=grids(layout), images_per_sample=torch.tensor([2]),
        do_sample=False, max_new_tokens=layout.stop, eos_token_id=None, pad_token_id=76,
        suppress_tokens=list(range(64, 72)),
    )[0, row.shape[1] :]  # fmt: skip
    pipe = Pipeline(model, drafter="jacobi", tree=tree)
    out = pipe(words, temperature=0, height=SIZE.height, width=SIZE.width, output_type="codes")
    assert out.history.tokens.tolist() == [*theirs.tolist(), 65]
    assert torch.equal(out.images[0], theirs[layout.grid_start :].view(3, 5))


def test_batches_of_different_lengths_equal_single_images(glm_image: ParityCase) -> None:
    pipe = Pipeline(glm_image.model, drafter="jacobi", tree="chain:depth=6")
    words, options = [PROMPT_TEXT, "snow on the blue ice", "cat"], {"height": 64, "width": 96, "output_type": "codes"}
    together = pipe(words, seed=[4, 5, 6], **options)
    alone = [pipe(text, seed=seed, **options) for text, seed in zip(words, (4, 5, 6), strict=True)]
    for index, out in enumerate(alone):
        assert (together.histories[index].tokens == out.history.tokens).all()


def test_sampling_defaults_of_the_authors(glm_image: ParityCase, tmp_path: Path) -> None:
    assert glm_image.model.defaults == SamplingDefaults(1.0, temperature=0.9, top_p=0.75)
    folder = shutil.copytree(glm_image.path, tmp_path / "glm")
    settings = {"temperature": 0.8, "top_p": 0.5, "top_k": 16512}
    (folder / "vision_language_encoder" / "generation_config.json").write_text(json.dumps(settings))
    assert family.read_spec(open_checkpoint(folder)).defaults == SamplingDefaults(1.0, temperature=0.8, top_p=0.5)


def test_any_multiple_of_32_is_a_size(glm_image: ParityCase) -> None:
    assert glm_image.model.resolve_size(96, 2048) == ImageSize(96, 2048)
    assert glm_image.model.resolve_size(1152, None) == ImageSize(1152, 768)
    with pytest.raises(ConfigError, match="or any multiples of 32 up to 2048"):
        glm_image.model.resolve_size(100, 96)


def test_decoder_folder_alone_gives_codes(glm_image: ParityCase, tmp_path: Path) -> None:
    """Without the rest of the pipeline codes can be drawn, and pixels are refused before anything is drawn."""
    folder = shutil.copytree(glm_image.path / "vision_language_encoder", tmp_path / "decoder")
    shutil.copy(glm_image.path / "processor" / "tokenizer.json", folder)
    pipe = Pipeline.from_pretrained(folder, drafter="jacobi", tree="none", device="cpu")
    with pytest.raises(Exception, match="autoregressive part only") as caught:
        pipe(PROMPT_TEXT, height=64, width=64)
    assert type(caught.value).__name__ == "UnsupportedError"
    out = pipe(PROMPT_TEXT, height=64, width=64, seed=1, output_type="codes")
    whole = Pipeline(glm_image.model, drafter="jacobi", tree="none")
    expected = whole(PROMPT_TEXT, height=64, width=64, seed=1, output_type="codes")
    assert torch.equal(out.images, expected.images)


def test_saved_pipeline_draws_the_same_image(glm_image: ParityCase, tmp_path: Path) -> None:
    pipe = Pipeline(glm_image.model, drafter="jacobi", tree="none")
    pipe.save_pretrained(tmp_path / "copy")
    copy = Pipeline.from_pretrained(tmp_path / "copy", device="cpu")
    options = {"height": 64, "width": 64, "seed": 2, "output_type": "codes"}
    assert torch.equal(copy(PROMPT_TEXT, **options).images, pipe(PROMPT_TEXT, **options).images)


def test_folder_of_a_custom_pipeline_loads(glm_image: ParityCase, tmp_path: Path) -> None:
    """As diffusers saves the one of integrations/diffusers."""
    folder = shutil.copytree(glm_image.path, tmp_path / "glm")
    custom = "UnderdrawGlmImagePipeline"
    for name, matches in ((custom, True), (["pipeline", custom], True), ("FluxPipeline", False), ([], False)):
        (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert family.matches(open_checkpoint(folder)) == matches


def test_smallest_image_with_the_default_tree(glm_image: ParityCase) -> None:
    """Two codes a row, fewer than policies usually see."""
    options = {"height": 64, "width": 64, "seed": 2, "output_type": "codes"}
    drawn, plain = (Pipeline(glm_image.model, tree=tree)(PROMPT_TEXT, **options).images for tree in ("auto", "none"))
    assert torch.equal(drawn, plain)


def test_damaged_configurations_are_refused(glm_image: ParityCase, tmp_path: Path) -> None:
    folder = shutil.copytree(glm_image.path, tmp_path / "glm")
    path = folder / "vision_language_encoder" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="must be three numbers with the sum 4"):
        parity_cases.load(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"has no vision_language_encoder/config\.json"):
        parity_cases.load(folder)


def test_published_shape() -> None:
    """8.9 B parameters with the full head, of which the codes' rows are kept."""
    shape = model_shape("glm-image-9b")
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(shape.arch).parameters())
    assert parameters == pytest.approx(8.915e9, rel=0.001)
    assert shape.layout.stop == 1280 and shape.arch.rope.axes == (8, 12, 12) and shape.arch.head_width == 128
