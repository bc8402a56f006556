"""Emu3 against transformers: prompts, logits, and whole greedy images by its `generate`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import author_layouts
import checkpoint_writers
import parity_cases
import pytest
import torch
from parity_cases import ParityCase
from safetensors.torch import load_file, save_file
from torch import Tensor

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.models.emu3 import NEGATIVE_PROMPT, list_sizes, special_tokens
from underdraw.models.family import ImageSize
from underdraw.models.text_tokenizers import load_text_tokenizer
from underdraw.pipeline import Pipeline

PROMPT_TEXT = "a red fox"
CODES = range(240, 304)


def random_tokens(count: int) -> Tensor:
    return torch.randint(CODES.start, CODES.stop, (count,), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0, :, CODES.start : CODES.stop]


def test_prompt_tokens(emu3: ParityCase) -> None:
    """Start, text, image start, rows*columns, image; the negative prompt is a sequence of its own."""
    model = emu3.model
    four, star = 20 + 22 + 4, 20 + 19
    header = (3, four, star, four, 5)
    prompt = model.make_prompt(PROMPT_TEXT, None, model.sizes[0])
    assert prompt.condition == (1, 20, 21, 22, *header)
    assert prompt.unconditional == model.make_prompt(NEGATIVE_PROMPT, None, model.sizes[0]).condition
    assert model.make_prompt(PROMPT_TEXT, "", model.sizes[0]).unconditional == (1, *header)


def test_guided_logits_match_transformers(emu3: ParityCase) -> None:
    """Along an image row, its end token and the next row; the two guidance rows differ in length."""
    model, size = emu3.model, emu3.model.sizes[0]
    layout, prompt = model.make_layout(size), model.make_prompt(PROMPT_TEXT, "blue ice on the snow", size)
    tokens = torch.cat([random_tokens(4), torch.tensor([6]), random_tokens(3)])
    ours = parity_cases.chain_logits(model, prompt, layout, tokens, 3.0)
    cond, uncond = (
        logits(emu3.reference, [*row, *tokens.tolist()])[len(row) - 1 :]
        for row in (prompt.condition, prompt.unconditional)
    )
    torch.testing.assert_close(ours, uncond + 3.0 * (cond - uncond), atol=1e-4, rtol=0)


@pytest.mark.parametrize("tree", ["none", "adjacency"])
@pytest.mark.parametrize("size", [ImageSize(32, 32), ImageSize(24, 40)])
def test_greedy_images_match_transformers(emu3: ParityCase, tree: str, size: ImageSize) -> None:
    """transformers' loop with unbatched guidance and allowed tokens by position, as the authors run it."""
    model = emu3.model
    layout, prompt = model.make_layout(size), model.make_prompt(PROMPT_TEXT, "blue ice", size)
    assert size in model.sizes
    row, negative = (torch.tensor([part]) for part in (prompt.condition, prompt.unconditional))
    epilogue = list(layout.epilogue)

    def allowed(_: int, ids: Tensor) -> list[int]:
        step = len(ids) - row.shape[1]
        raster = layout.height * (layout.width + 1)
        if step >= raster:
            return [epilogue[step - raster]]
        return [6] if step % (layout.width + 1) == layout.width else list(CODES)

    theirs = emu3.reference.generate(
        input_ids=row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=layout.steps,
        guidance_scale=3.0, negative_prompt_ids=negative, negative_prompt_attention_mask=torch.ones_like(negative),
        prefix_allowed_tokens_fn=allowed, pad_token_id=0,
    )[0, row.shape[1] :]  # fmt: skip
    pipe = Pipeline(model, drafter="jacobi", tree=tree)
    out = pipe(
        PROMPT_TEXT,
        negative_prompt="blue ice",
        temperature=0,
        height=size.height,
        width=size.width,
        output_type="codes",
    )
    assert torch.equal(out.images[0], layout.grid(theirs))
    assert theirs[-3:].tolist() == epilogue


def test_decoded_pixels_match_transformers(emu3: ParityCase) -> None:
    """The first of the four frames that transformers decodes."""
    codes = (random_tokens(24) - CODES.start).view(2, 3, 4)
    with torch.no_grad():
        theirs = emu3.reference.model.vqmodel.decode(codes).clamp(-1, 1)
    torch.testing.assert_close(emu3.model.image_tokenizer.decode(codes), theirs, atol=1e-4, rtol=0)


def test_encoded_codes_match_transformers(emu3: ParityCase) -> None:
    pixels = torch.randn(2, 3, 24, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = emu3.reference.model.vqmodel.encode(pixels, torch.tensor([[24, 32]] * 2)).image_tokens
    assert torch.equal(emu3.model.image_tokenizer.encode(pixels), torch.stack(list(theirs)))


def test_older_tensor_names_load(tmp_path: Path, emu3: ParityCase) -> None:
    """transformers 4.48 to 4.51 saved the same model under other prefixes."""
    folder = tmp_path / "old"
    folder.mkdir()
    state = {}
    for file in emu3.path.glob("*.safetensors"):
        for name, value in load_file(file).items():
            name = name.replace("model.text_model.", "text_model.model.").replace("model.vqmodel.", "vqmodel.")
            state["text_model.lm_head.weight" if name == "lm_head.weight" else name] = value
    save_file(state, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(emu3.path / name, folder)
    old, new = parity_cases.load(folder).target.net.state_dict(), emu3.model.target.net.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in new)


def test_published_sizes() -> None:
    """720x720 as 90x90 codes, and the authors' ratios at the same area."""
    sizes = [str(size) for size in list_sizes(518400, 8)]
    assert sizes[:3] == ["720x720", "624x832", "832x624"] and "544x960" in sizes and len(sizes) == 7


def test_scattered_image_tokens_are_an_error(tmp_path: Path, emu3: ParityCase) -> None:
    folder = shutil.copytree(emu3.path, tmp_path / "emu3")
    config = json.loads((folder / "config.json").read_text())
    config["vocabulary_map"]["<|visual token 000063|>"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="not 64 in a row"):
        parity_cases.load(folder)


def test_published_special_token_ids() -> None:
    tokens = special_tokens({}, 32768)
    assert tokens.codes == range(151854, 184622) and tokens.row_end == 151846
    assert (tokens.start, tokens.end) == (151849, 151850)
    assert (tokens.image_start, tokens.image_end, tokens.image) == (151852, 151853, 151851)
    assert tokens.frame_end == 151847
    assert checkpoint_writers.EMU3_SPECIALS.keys() >= {"<|extra_200|>", "<|image token|>"}


def test_baai_layout_matches_transformers(tmp_path: Path) -> None:
    """BAAI/Emu3-Gen, with its image tokenizer in a repository of its own and a text tokenizer in tiktoken's format."""
    reference = author_layouts.write_baai_emu3(tmp_path / "Emu3-Gen", tmp_path / "Emu3-VisionTokenizer")
    model, ids = parity_cases.load(tmp_path / "Emu3-Gen"), author_layouts.baai_emu3_config()
    size = model.sizes[0]
    layout, prompt = model.make_layout(size), model.make_prompt("a fox", "", size)
    assert layout.codes == range(ids["vocab_size"] - 64, ids["vocab_size"]) and layout.row_end == ids["eol_token_id"]
    header = (ids["boi_token_id"], *b"4*4", ids["img_token_id"])
    assert prompt.condition == (ids["bos_token_id"], *b"a fox", *header)
    tokens = torch.randint(layout.codes.start, layout.codes.stop, (4,), generator=torch.Generator().manual_seed(3))
    ours = parity_cases.chain_logits(model, prompt, layout, tokens)
    with torch.no_grad():
        row = torch.tensor([[*prompt.condition, *tokens.tolist()]])
        theirs = reference(input_ids=row).logits[0, len(prompt.condition) - 1 :, layout.codes.start :]
        codes = torch.arange(16).view(1, 4, 4)
        pixels = reference.model.vqmodel.decode(codes).view(-1, 3, 32, 32)[:1].clamp(-1, 1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.image_tokenizer.decode(codes), pixels, atol=1e-4, rtol=0)


def test_attention_heads_of_the_image_tokenizer_are_not_ignored(emu3: ParityCase, tmp_path: Path) -> None:
    shutil.copytree(emu3.path, tmp_path / "emu3")
    config = json.loads((tmp_path / "emu3" / "config.json").read_text())
    config["vq_config"]["num_attention_heads"] = 2
    (tmp_path / "emu3" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"2 attention heads.*only 1 head"):
        parity_cases.load(tmp_path / "emu3")


def test_text_is_split_as_by_the_authors(emu3: ParityCase, tmp_path: Path) -> None:
    """The tokenizer.json of the conversion splits digits in threes; the authors split them singly, and compose text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {**alphabet, "12": len(alphabet), "123": len(alphabet) + 1}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2"), ("12", "3")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = shutil.copytree(emu3.path, tmp_path / "emu3")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert load_text_tokenizer(folder / "tokenizer.json").encode("123") == [vocabulary["123"]]
    model = parity_cases.load(folder)
    digits, composed, decomposed = (
        model.make_prompt(text, None, model.sizes[0]).condition for text in ("123", "caf\u00e9", "cafe\u0301")
    )
    assert digits[1:4] == tuple(alphabet[digit] for digit in "123") and composed == decomposed
