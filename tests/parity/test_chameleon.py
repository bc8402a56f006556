"""Anole and Lumina against transformers' Chameleon, row by row of the guidance batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import along
import published
import pytest
import torch
from along import Case
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.models.family import ImageSize
from underdraw.protocols import Prompt

WORDS = "a red fox"


def transformers_model(state: dict[str, Tensor], rows: int, **changes: Any) -> Any:
    """transformers' Chameleon with the same weights; its image tokenizer plays no part."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    vq = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 8}
    config = ChameleonConfig(
        **published.CHAMELEON, vq_config=vq, vocabulary_map={"<image>": 8711, "IMGIMGAZ": 4}, **changes
    )
    model = ChameleonForConditionalGeneration(config).eval()
    own = {}
    for name, value in state.items():
        if not name.startswith("images."):
            spread = "_norm." in name and "self_attn" in name
            own[name] = value.repeat_interleave(4 // value.shape[0], 0) if spread else value
    missing, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected and all(name.startswith("model.vqmodel") for name in missing)
    return model


@torch.no_grad()
def logits(model: Any, tokens: list[int], mask: list[int] | None = None, positions: list[int] | None = None) -> Tensor:
    """transformers' logits of the image codes at every place; its class masks them, so the head is applied here."""
    extra = {} if mask is None else {"attention_mask": torch.tensor([mask]), "position_ids": torch.tensor([positions])}
    hidden = model.model(input_ids=torch.tensor([tokens]), **extra).last_hidden_state[0]
    return (hidden @ model.lm_head.weight.T)[:, 4:8196]


def drawn(count: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 8196, (count,), generator=torch.Generator().manual_seed(seed))


def test_anole_rows(anole: Case) -> None:
    """The prompt is <s> text separator image-start; without words it is <s> image-start, at places 0 and 1."""
    model = anole.model
    prompt = model.make_prompt(WORDS, None, model.sizes[0])
    assert prompt.condition == (0, 8900, 8901, 8902, 8710, 8197)
    assert prompt.unconditional == (0, 8197)
    assert model.make_prompt(WORDS, "snow", model.sizes[0]).unconditional == (0, 8907, 8710, 8197)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_anole_logits(rows: int, tmp_path: Path) -> None:
    """With a query norm for all heads, for each half of them (two shards), and for each head."""
    state = published.anole(tmp_path, rows=rows)
    model, other = along.load(tmp_path), transformers_model(state, rows)
    assert model.target.net.arch.qk_norm_heads == ("shared" if rows == 1 else "per_head")
    size, tokens = model.sizes[0], drawn(9)
    prompt = model.make_prompt(WORDS, None, size)
    ours = along.logits_along(model, prompt, model.make_layout(size), tokens)
    theirs = logits(other, [*prompt.condition, *tokens.tolist()])[len(prompt.condition) - 1 :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_anole_swin_norm(tmp_path: Path) -> None:
    """The order of norms of the 34B model."""
    state = published.anole(tmp_path, swin_norm=True)
    model, other = along.load(tmp_path), transformers_model(state, 4, swin_norm=True)
    prompt, tokens = Prompt((0, 8900, 8197)), drawn(5)
    ours = along.logits_along(model, prompt, model.make_layout(model.sizes[0]), tokens)
    theirs = logits(other, [0, 8900, 8197, *tokens.tolist()])[2:]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_anole_guidance(anole: Case) -> None:
    """u + s (c - u), where the authors' unconditional row is padded on the left, masked and placed from 0."""
    model, other = anole.model, transformers_model(anole.source, 4)
    size, tokens = model.sizes[0], drawn(9)
    prompt = model.make_prompt(WORDS, None, size)
    length = len(prompt.condition)
    ours = along.logits_along(model, prompt, model.make_layout(size), tokens, guidance=3.0)
    cond = logits(other, [*prompt.condition, *tokens.tolist()])
    padded = [1] * (length - 2) + [0, 8197] + tokens.tolist()
    places = [0] * (length - 2) + list(range(2 + len(tokens)))
    uncond = logits(other, padded, [int(token != 1) for token in padded], places)
    theirs = (uncond + 3.0 * (cond - uncond))[length - 1 :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_anole_guidance_one_is_conditional(anole: Case) -> None:
    size, tokens = anole.model.sizes[0], drawn(4)
    prompt, layout = anole.model.make_prompt(WORDS, None, size), anole.model.make_layout(size)
    alone = along.logits_along(anole.model, Prompt(prompt.condition), layout, tokens)
    assert torch.equal(along.logits_along(anole.model, prompt, layout, tokens, guidance=1.0), alone)


def test_anole_takes_meta_files(tmp_path: Path, anole: Case) -> None:
    """text_tokenizer.json and vqgan.ckpt in the place of what newer uploads have inside."""
    published.anole(tmp_path, decoder=False)
    model = along.load(tmp_path)
    size, codes = model.sizes[0], torch.arange(16).view(1, 4, 4) * 500
    assert model.make_prompt(WORDS, None, size) == anole.model.make_prompt(WORDS, None, size)
    assert torch.equal(model.image_tokenizer.decode(codes), anole.model.image_tokenizer.decode(codes))


def test_anole_without_text_tokenizer(tmp_path: Path) -> None:
    published.anole(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"text_tokenizer\.json.*UNDERDRAW_FILES"):
        along.load(tmp_path)


def test_lumina_rows(lumina: Case) -> None:
    """An order with the size, then the separator; without words the row starts at the image itself."""
    model, size = lumina.model, ImageSize(96, 160)
    prompt = model.make_prompt(WORDS, None, size)
    assert prompt.unconditional == ()
    assert model.make_layout(size).prologue == (8197, 8804 + 3, 8804 + 5)
    words = published.WORDS.split()
    text = "Generate an image of 160x96 according to the following prompt : a red fox"  # the width comes first
    ids = {word: 8900 + index for index, word in enumerate([*words, "<unk>", "*", ":", "160x96"])}
    assert prompt.condition == (0, *(ids[word] for word in text.split()), 8710)


def test_lumina_logits(lumina: Case) -> None:
    """Both rows along a whole row of the picture and its end; the unconditional row's places count from its start."""
    model, other = (
        lumina.model,
        transformers_model(
            lumina.source,
            1,
        ),
    )
    size = model.sizes[0]
    layout, prompt = model.make_layout(size), model.make_prompt(WORDS, None, size)
    tokens = torch.cat([drawn(8), torch.tensor([8803]), drawn(3, 1)])
    ours = along.logits_along(model, prompt, layout, tokens, guidance=4.0)
    image = [*layout.prologue, *tokens.tolist()]
    cond = logits(other, [*prompt.condition, *image])[len(prompt.condition) + 2 :]
    uncond = logits(other, image)[2:]
    torch.testing.assert_close(ours, uncond + 4.0 * (cond - uncond), atol=1e-4, rtol=0)


def test_lumina_differs_from_anole_by_its_configuration(anole: Case, lumina: Case) -> None:
    assert (anole.model.family, lumina.model.family) == ("anole", "lumina")
