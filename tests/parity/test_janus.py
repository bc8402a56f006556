"""Janus against transformers: prompts, logits, and whole greedy images by its `generate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import author_layouts
import parity_cases
import pytest
import torch
from parity_cases import ParityCase
from torch import Tensor

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.pipeline import Pipeline

PROMPT_TEXT = "a red fox"


def random_codes(count: int) -> Tensor:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model: object, row: tuple[int, ...], codes: Tensor) -> Tensor:
    """transformers' image logits after a row of text tokens and after each code."""
    text = model.get_input_embeddings()(torch.tensor([row]))  # type: ignore[attr-defined]
    image = model.prepare_embeddings_for_image_generation(codes[None])  # type: ignore[attr-defined]
    hidden = model.model.language_model(inputs_embeds=torch.cat([text, image], 1)).last_hidden_state  # type: ignore[attr-defined]
    return model.model.generation_head(hidden)[0, len(row) - 1 :]  # type: ignore[attr-defined]


def test_prompt_tokens(janus: ParityCase) -> None:
    """One chat turn; the unconditional row is as long, with padding between start and image start."""
    prompt = janus.model.make_prompt(f" {PROMPT_TEXT} ", None, janus.model.sizes[0])
    colon = 20 + 20
    assert prompt.condition == (1, 6, colon, 20, 21, 22, 7, colon, 4)
    assert prompt.unconditional == (1, *[2] * 7, 4)
    assert janus.model.make_prompt(PROMPT_TEXT, "ice", janus.model.sizes[0]).unconditional == (
        1,
        6,
        colon,
        26,
        7,
        colon,
        4,
    )


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_logits_match_transformers(janus: ParityCase, scale: float) -> None:
    ours, cond, uncond = parity_cases.compare_guided_logits(janus, PROMPT_TEXT, random_codes(11), scale, logits)
    torch.testing.assert_close(ours, uncond + scale * (cond - uncond), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tree", ["none", "adjacency"])
@pytest.mark.parametrize("words", [PROMPT_TEXT, "snow on the blue ice"])
def test_greedy_images_match_transformers(janus: ParityCase, tree: str, words: str) -> None:
    pipe = Pipeline(janus.model, drafter="jacobi", tree=tree)
    ours = pipe(words, temperature=0, output_type="codes").images
    row = torch.tensor([janus.model.make_prompt(words, None, janus.model.sizes[0]).condition])
    theirs = janus.reference.generate(
        row, attention_mask=torch.ones_like(row), generation_mode="image", do_sample=False, guidance_scale=5
    )
    assert torch.equal(ours.flatten(1), theirs)


def test_decoded_pixels_match_transformers(janus: ParityCase) -> None:
    codes = random_codes(16).view(1, 16)
    theirs = janus.reference.model.vqmodel.decode(codes).clamp(-1, 1)
    torch.testing.assert_close(janus.model.image_tokenizer.decode(codes.view(1, 4, 4)), theirs, atol=1e-4, rtol=0)


def test_encoder_outputs_match_transformers(janus: ParityCase) -> None:
    """Compared before quantisation, since transformers does not normalise the vectors to length 1 as the authors do."""
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    other, ours = janus.reference.model.vqmodel, janus.model.image_tokenizer
    with torch.no_grad():
        theirs = other.quant_conv(other.encoder(pixels))
        torch.testing.assert_close(ours.quant_conv(ours.encoder(pixels)), theirs, atol=1e-4, rtol=0)
    cells, book = (torch.nn.functional.normalize(x, dim=-1) for x in (theirs.movedim(1, -1), ours.codebook))
    assert torch.equal(ours.encode(pixels), (cells @ book.T).argmax(-1))


def test_checkpoint_has_many_shards(janus: ParityCase) -> None:
    assert len(list(janus.path.glob("*.safetensors"))) > 10


def test_missing_shard_is_named(tmp_path: Path, janus: ParityCase) -> None:
    folder = shutil.copytree(janus.path, tmp_path / "janus")
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    lost = files["weight_map"]["model.language_model.layers.1.mlp.down_proj.weight"]
    (folder / lost).unlink()
    with pytest.raises(CheckpointError, match=f"has no {lost}"):
        parity_cases.load(folder)


def test_deepseek_layout_loads_the_same_model(janus: ParityCase, tmp_path: Path) -> None:
    """deepseek-ai/Janus-Pro-*, as published by its authors."""
    author_layouts.write_deepseek_janus(tmp_path / "janus", janus.reference)
    model = parity_cases.load(tmp_path / "janus")
    size = model.sizes[0]
    assert size == janus.model.sizes[0]
    assert model.make_prompt(PROMPT_TEXT, None, size) == janus.model.make_prompt(PROMPT_TEXT, None, size)
    layout, codes = model.make_layout(size), random_codes(11)
    prompt, tokens = model.make_prompt(PROMPT_TEXT, None, size), codes + layout.codes.start
    ours, expected = (parity_cases.chain_logits(m, prompt, layout, tokens, 5.0) for m in (model, janus.model))
    assert torch.equal(ours, expected)
    grid = random_codes(16).view(1, 4, 4)
    assert torch.equal(model.image_tokenizer.decode(grid), janus.model.image_tokenizer.decode(grid))


def test_other_activation_is_refused(janus: ParityCase, tmp_path: Path) -> None:
    shutil.copytree(janus.path, tmp_path / "janus")
    config = json.loads((tmp_path / "janus" / "config.json").read_text())
    config["vq_config"]["hidden_act"] = "relu"
    (tmp_path / "janus" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"vq_config\.hidden_act 'relu'; only gelu"):
        parity_cases.load(tmp_path / "janus")
