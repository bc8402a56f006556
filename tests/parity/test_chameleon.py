"""Anole and Lumina against transformers' Chameleon: prompts, and logits of both guidance rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_writers
import parity_cases
import pytest
import torch
from parity_cases import ParityCase
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.models.family import ImageSize
from underdraw.protocols import Prompt

PROMPT_TEXT = "a red fox"


def transformers_model(state: dict[str, Tensor], **config_changes: Any) -> Any:
    """transformers' Chameleon with the same decoder weights; its image tokenizer stays random and is not used."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    vq = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 8}
    config = ChameleonConfig(
        **checkpoint_writers.CHAMELEON, vq_config=vq, vocabulary_map={"<image>": 8711, "IMGIMGAZ": 4}, **config_changes
    )
    model = ChameleonForConditionalGeneration(config).eval()
    decoder_state = {}
    for name, value in state.items():
        if not name.startswith("images."):
            is_qk_norm = "_norm." in name and "self_attn" in name  # transformers has a row for each of the 4 heads
            decoder_state[name] = value.repeat_interleave(4 // value.shape[0], 0) if is_qk_norm else value
    missing, unexpected = model.load_state_dict(decoder_state, strict=False)
    assert not unexpected and all(name.startswith("model.vqmodel") for name in missing)
    return model


@torch.no_grad()
def logits(model: Any, tokens: list[int], mask: list[int] | None = None, positions: list[int] | None = None) -> Tensor:
    """transformers' logits of the image codes at every position; its class masks them, so the head is applied here."""
    extra = {} if mask is None else {"attention_mask": torch.tensor([mask]), "position_ids": torch.tensor([positions])}
    hidden = model.model(input_ids=torch.tensor([tokens]), **extra).last_hidden_state[0]
    return (hidden @ model.lm_head.weight.T)[:, 4:8196]


def random_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 8196, (count,), generator=torch.Generator().manual_seed(seed))


def test_anole_prompt_tokens(anole: ParityCase) -> None:
    """The prompt is <s> text separator image-start; without text it is <s> image-start."""
    model = anole.model
    prompt = model.make_prompt(PROMPT_TEXT, None, model.sizes[0])
    assert prompt.condition == (0, 8900, 8901, 8902, 8710, 8197)
    assert prompt.unconditional == (0, 8197)
    assert model.make_prompt(PROMPT_TEXT, "snow", model.sizes[0]).unconditional == (0, 8907, 8710, 8197)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_anole_logits_match_transformers(rows: int, tmp_path: Path) -> None:
    """With one query norm for all heads, one per shard of two heads, and one per head."""
    state = checkpoint_writers.write_anole(tmp_path, rows=rows)
    model, other = parity_cases.load(tmp_path), transformers_model(state)
    assert model.target.net.arch.qk_norm_heads == ("shared" if rows == 1 else "per_head")
    size, tokens = model.sizes[0], random_tokens(9)
    prompt = model.make_prompt(PROMPT_TEXT, None, size)
    ours = parity_cases.chain_logits(model, prompt, model.make_layout(size), tokens)
    theirs = logits(other, [*prompt.condition, *tokens.tolist()])[len(prompt.condition) - 1 :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_anole_swin_norm_logits_match_transformers(tmp_path: Path) -> None:
    """The norm order of the 34B model."""
    state = checkpoint_writers.write_anole(tmp_path, swin_norm=True)
    model, other = parity_cases.load(tmp_path), transformers_model(state, swin_norm=True)
    prompt, tokens = Prompt((0, 8900, 8197)), random_tokens(5)
    ours = parity_cases.chain_logits(model, prompt, model.make_layout(model.sizes[0]), tokens)
    theirs = logits(other, [0, 8900, 8197, *tokens.tolist()])[2:]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_anole_guided_logits_match_transformers(anole: ParityCase) -> None:
    """u + s (c - u); the authors pad the unconditional row on the left and count positions after the padding."""
    model, other = anole.model, transformers_model(anole.reference)
    size, tokens = model.sizes[0], random_tokens(9)
    prompt = model.make_prompt(PROMPT_TEXT, None, size)
    length = len(prompt.condition)
    ours = parity_cases.chain_logits(model, prompt, model.make_layout(size), tokens, guidance=3.0)
    cond = logits(other, [*prompt.condition, *tokens.tolist()])
    padded = [1] * (length - 2) + [0, 8197] + tokens.tolist()
    positions = [0] * (length - 2) + list(range(2 + len(tokens)))
    uncond = logits(other, padded, [int(token != 1) for token in padded], positions)
    theirs = (uncond + 3.0 * (cond - uncond))[length - 1 :]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_guidance_one_equals_conditional_logits(anole: ParityCase) -> None:
    size, tokens = anole.model.sizes[0], random_tokens(4)
    prompt, layout = anole.model.make_prompt(PROMPT_TEXT, None, size), anole.model.make_layout(size)
    conditional = parity_cases.chain_logits(anole.model, Prompt(prompt.condition), layout, tokens)
    assert torch.equal(parity_cases.chain_logits(anole.model, prompt, layout, tokens, guidance=1.0), conditional)


def test_anole_reads_metas_tokenizer_files(tmp_path: Path, anole: ParityCase) -> None:
    """text_tokenizer.json and vqgan.ckpt, for uploads whose checkpoint lacks them."""
    checkpoint_writers.write_anole(tmp_path, decoder=False)
    model = parity_cases.load(tmp_path)
    size, codes = model.sizes[0], torch.arange(16).view(1, 4, 4) * 500
    assert model.make_prompt(PROMPT_TEXT, None, size) == anole.model.make_prompt(PROMPT_TEXT, None, size)
    assert torch.equal(model.image_tokenizer.decode(codes), anole.model.image_tokenizer.decode(codes))


def test_missing_text_tokenizer_is_an_error(tmp_path: Path) -> None:
    checkpoint_writers.write_anole(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"text_tokenizer\.json.*UNDERDRAW_FILES"):
        parity_cases.load(tmp_path)


def test_lumina_prompt_tokens(lumina: ParityCase) -> None:
    """An instruction with the size, then the separator; without text the row starts at the image itself."""
    model, size = lumina.model, ImageSize(96, 160)
    prompt = model.make_prompt(PROMPT_TEXT, None, size)
    assert prompt.unconditional == ()
    assert model.make_layout(size).prologue == (8197, 8804 + 3, 8804 + 5)
    words = checkpoint_writers.WORDS.split()
    text = "Generate an image of 160x96 according to the following prompt : a red fox"  # the width comes first
    ids = {word: 8900 + index for index, word in enumerate([*words, "<unk>", "*", ":", "160x96"])}
    assert prompt.condition == (0, *(ids[word] for word in text.split()), 8710)


def test_lumina_guided_logits_match_transformers(lumina: ParityCase) -> None:
    """Along a whole row of the image and its end token; positions of the unconditional row count from its start."""
    model, other = lumina.model, transformers_model(lumina.reference)
    size = model.sizes[0]
    layout, prompt = model.make_layout(size), model.make_prompt(PROMPT_TEXT, None, size)
    tokens = torch.cat([random_tokens(8), torch.tensor([8803]), random_tokens(3, 1)])
    ours = parity_cases.chain_logits(model, prompt, layout, tokens, guidance=4.0)
    image = [*layout.prologue, *tokens.tolist()]
    cond = logits(other, [*prompt.condition, *image])[len(prompt.condition) + 2 :]
    uncond = logits(other, image)[2:]
    torch.testing.assert_close(ours, uncond + 4.0 * (cond - uncond), atol=1e-4, rtol=0)


def test_configuration_distinguishes_lumina_and_anole(anole: ParityCase, lumina: ParityCase) -> None:
    assert (anole.model.family, lumina.model.family) == ("anole", "lumina")
