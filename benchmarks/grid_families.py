"""The models of grid_models.py in the classes of transformers that `custom_generate` supports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from grid_models import (
    CONSTANT,
    SHARPNESS,
    Axis,
    GridModel,
    Sizes,
    Tokens,
    look_above,
    randomise,
    raster_axis,
    set_norm,
)
from torch import Tensor
from torch.nn import functional

from underdraw.models import glm_image

START, PAD, END, IMAGE_START, IMAGE, WORD = 1, 2, 3, 4, 5, 20  # token ids
GLM_THETA = 2.0


def make_janus(sizes: Sizes, device: str = "cpu", dtype: torch.dtype = torch.float32) -> GridModel:
    side, width = sizes.side, sizes.width
    config = transformers.JanusConfig(
        text_config={
            **decoder_config(sizes), "model_type": "llama", "vocab_size": sizes.words, "bos_token_id": START,
            "pad_token_id": PAD, "eos_token_id": END,
        },
        vision_config={  # as small as it can be: drawing does not use it
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16 * side,
            "patch_size": 16, "projection_dim": width, "num_image_tokens": side * side,
        },
        vq_config={
            "embed_dim": 8, "num_embeddings": sizes.codes, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1, 2], "num_patches": side, "projection_dim": width,
            "image_token_embed_dim": width,
        },
        image_token_id=IMAGE,
    )  # fmt: skip
    model = new_model(transformers.JanusForConditionalGeneration, config, device, dtype)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=START, pad_token_id=PAD, eos_token_id=END, guidance_scale=5,
        generation_kwargs={"boi_token_id": IMAGE_START},
    )  # fmt: skip
    inner = model.model
    with torch.no_grad():
        inner.language_model.embed_tokens.weight.mul_(width**0.5)[:, 0] = CONSTANT * width**0.5
        inner.generation_embeddings.weight.mul_(8**0.5)
        last = inner.generation_aligner.hidden_layers[-1]
        last.weight.mul_(2.0)[0] = 0  # half of the scale is lost in the activation
        last.bias[0] = CONSTANT * width**0.5
    set_norm(inner.language_model.norm, 0.0)
    look_above(inner.language_model.layers, [raster_axis(side - 1, width // sizes.heads, 10000.0)])
    prompt = (START, WORD, WORD + 1, IMAGE_START)

    def features(codes: Tensor, prompt: Tokens) -> Tensor:
        text = model.get_input_embeddings()(torch.tensor([prompt], device=codes.device)).expand(len(codes), -1, -1)
        states = torch.cat([text, model.prepare_embeddings_for_image_generation(codes[:, :-1])], 1)
        states = inner.language_model(inputs_embeds=states).last_hidden_state[:, len(prompt) - 1 :]
        head = inner.generation_head
        return head.activation_fn(head.proj_out(states))

    def plain_options() -> dict[str, Any]:
        """With the cache that Janus makes by default, which transformers 5.13 to 5.17 cannot make themselves."""
        cache = transformers.StaticCache(config=config.text_config, max_cache_len=len(prompt) + side * side)
        return {"generation_mode": "image", "max_new_tokens": 1, "past_key_values": cache}

    return GridModel(
        model, side, prompt, inner.language_model.layers, features, inner.generation_head.vision_head, 0, side * side,
        plain_options, 5.0, (START, PAD, PAD, IMAGE_START),
    )  # fmt: skip


def make_emu3(sizes: Sizes, device: str = "cpu", dtype: torch.dtype = torch.float32) -> GridModel:
    """Rows have an end token, and guidance a negative prompt."""
    side, first, row_end, ends = sizes.side, sizes.words, 6, [7, 4, 2]
    names = {
        "<|extra_203|>": 1, "<|extra_204|>": 2, "<|image start|>": 3, "<|image end|>": 4, "<|image token|>": 5,
        "<|extra_200|>": row_end, "<|extra_201|>": 7, "<image>": 8,
    }  # fmt: skip
    names |= {f"<|visual token {code:06d}|>": first + code for code in range(sizes.codes)}
    config = transformers.Emu3Config(
        text_config={
            **decoder_config(sizes), "vocab_size": first + sizes.codes, "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0,
        },
        vq_config={
            "codebook_size": sizes.codes, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2], "hidden_size": 64,
            "attn_resolutions": [3],
        },
        vocabulary_map=names,
    )  # fmt: skip
    model = new_model(transformers.Emu3ForConditionalGeneration, config, device, dtype)
    decoder = model.model.text_model
    prompt = (1, WORD, WORD + 1, 3, WORD + 2, 5)
    cells = [step % (side + 1) < side for step in range(side * (side + 1))]  # whether a token is a code
    codes_allowed = torch.arange(first, first + sizes.codes, device=device)  # faster than transformers' usual list

    def features(codes: Tensor, prompt: Tokens) -> Tensor:
        tokens = functional.pad(codes.view(-1, side, side) + first, (0, 1), value=row_end).flatten(1)
        ids = torch.cat([torch.tensor([prompt], device=codes.device).expand(len(codes), -1), tokens[:, :-1]], 1)
        return decoder(input_ids=ids).last_hidden_state[:, len(prompt) - 1 :][:, torch.tensor(cells)]

    def allowed(_: int, row: Tensor) -> Tensor | list[int]:
        step = len(row) - len(prompt)
        if step >= len(cells):
            return [ends[min(step - len(cells), 2)]]
        return codes_allowed if cells[step] else [row_end]

    negative = (1, WORD + 3, WORD + 3, 3, WORD + 2, 5)
    negative_ids = torch.tensor([negative], device=device)
    options = {
        "negative_prompt_ids": negative_ids, "negative_prompt_attention_mask": torch.ones_like(negative_ids),
        "guidance_scale": 3.0, "prefix_allowed_tokens_fn": allowed,
    }  # fmt: skip
    theta = config.text_config.rope_parameters["rope_theta"]
    prepare_decoder(decoder, [raster_axis(side, sizes.width // sizes.heads, theta)])
    tokens = len(cells) + len(ends)
    return GridModel(
        model, side, prompt, decoder.layers, features, model.lm_head, first, tokens,
        lambda: {"max_new_tokens": tokens}, 3.0, negative, options, {"image_size": (side, side)}, returns_prompt=True,
    )  # fmt: skip


def make_chameleon(sizes: Sizes, device: str = "cpu", dtype: torch.dtype = torch.float32) -> GridModel:
    """Codes are tokens 4 to 8195; without their names in the vocabulary, transformers does not hide them."""
    side, first = sizes.side, 4
    config = transformers.ChameleonConfig(
        **decoder_config(sizes), vocab_size=max(sizes.words, 9216),
        vq_config={
            "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8,
            "embed_dim": 8, "resolution": 16 * side,
        },
        vocabulary_map={"<image>": 8711},
    )  # fmt: skip
    model = new_model(transformers.ChameleonForConditionalGeneration, config, device, dtype)
    prompt = (0, 8905, 8906, 8710, 8197)

    def features(codes: Tensor, prompt: Tokens) -> Tensor:
        start = torch.tensor([prompt], device=codes.device).expand(len(codes), -1)
        states = model.model(input_ids=torch.cat([start, codes[:, :-1] + first], 1)).last_hidden_state
        return states[:, len(prompt) - 1 :]

    prepare_decoder(model.model, [raster_axis(side - 1, sizes.width // sizes.heads, 10000.0)])
    return GridModel(
        model, side, prompt, model.model.layers, features, model.lm_head, first, side * side,
        lambda: {"max_new_tokens": side * side, "eos_token_id": None}, returns_prompt=True,
    )  # fmt: skip


def make_glm_image(sizes: Sizes, device: str = "cpu", dtype: torch.dtype = torch.float32) -> GridModel:
    """Two grids, the small one always of 16 x 16 codes; positions have three axes, so row ends have no cell above.

    In the published model (theta 10000) columns turn so slowly that a head that ignores content cannot tell neighbours
    apart; here theta is 2, which takes the same time. Rows count most, so that the first row does not copy itself.
    """
    small, first_word = glm_image.PREVIEW_SIDE, sizes.codes + 8
    start, end = sizes.codes, sizes.codes + 1
    rotated = sizes.width // sizes.heads // 4  # pairs: half of a head is rotated
    sections = [rotated // 4, 3 * rotated // 8, 3 * rotated // 8]  # time, rows, columns
    rope = {"rope_type": "default", "rope_theta": GLM_THETA, "partial_rotary_factor": 0.5, "mrope_section": sections}
    config = transformers.GlmImageConfig(
        text_config={
            **decoder_config(sizes), "vocab_size": first_word + sizes.words, "vision_vocab_size": first_word,
            "eos_token_id": end, "pad_token_id": first_word, "rope_parameters": rope,
        },
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 64, "patch_size": 8},
        vq_config={"num_embeddings": sizes.codes, "embed_dim": 16, "latent_channels": 32},
        image_token_id=first_word + 1, image_start_token_id=start, image_end_token_id=end,
    )  # fmt: skip
    model = new_model(transformers.GlmImageForConditionalGeneration, config, device, dtype)
    decoder = model.model.language_model
    prompt = (first_word + WORD, first_word + WORD + 1, start)
    cells = torch.arange(small * small - 1)
    text = torch.arange(len(prompt)).expand(3, -1)
    grid = len(prompt) + torch.stack([torch.zeros_like(cells), cells // small, cells % small])
    positions = torch.cat([text, grid], 1).to(device)  # (3, N) of the prompt and the small grid

    def features(codes: Tensor, prompt: Tokens) -> Tensor:
        ids = torch.cat([torch.tensor([prompt], device=codes.device).expand(len(codes), -1), codes[:, :-1]], 1)
        states = decoder(input_ids=ids, position_ids=positions[:, None].expand(-1, len(codes), -1)).last_hidden_state
        return states[:, len(prompt) - 1 :]

    _, rows, columns = (GLM_THETA ** (-torch.arange(rotated) / rotated)).split(sections)
    time = Axis(torch.ones(sections[0]), 0, sharpness=0.0)
    prepare_decoder(decoder, [time, Axis(rows, 1, sharpness=12 * SHARPNESS), Axis(columns, -1)])
    tokens = small * small + sizes.side**2
    options = {
        "image_grid_thw": torch.tensor([[1, sizes.side, sizes.side], [1, small, small]], device=device),
        "images_per_sample": torch.tensor([2], device=device),
    }
    return GridModel(
        model, small, prompt, decoder.layers, features, model.lm_head, 0, tokens,
        lambda: {"max_new_tokens": tokens, "eos_token_id": None}, options=options, returns_prompt=True,
    )  # fmt: skip


def decoder_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.width, "intermediate_size": sizes.mlp, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads or sizes.heads,
        "max_position_embeddings": 2048,
    }  # fmt: skip


@torch.no_grad()
def prepare_decoder(decoder: Any, axes: Sequence[Axis]) -> None:
    """A decoder whose codes are tokens of its embedding, and whose LM head has no bias."""
    width = decoder.embed_tokens.weight.shape[1]
    decoder.embed_tokens.weight.mul_(width**0.5)[:, 0] = CONSTANT * width**0.5
    set_norm(decoder.norm, 1.0)
    look_above(decoder.layers, axes)


def new_model(cls: Any, config: Any, device: str, dtype: torch.dtype) -> Any:
    """A model with seeded random weights, made on its device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
    randomise(model, torch.Generator(device).manual_seed(0))
    return model


FAMILIES = {"janus": make_janus, "emu3": make_emu3, "chameleon": make_chameleon, "glm_image": make_glm_image}
