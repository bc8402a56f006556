"""Models in transformers' classes whose images mostly repeat the row above, so that drafts can be right or wrong.

With purely random weights every greedy choice depends on every token before, so no draft is ever right; image models
are not like that. Here all weights are random too, but one head of the first layer looks at the cell above, the other
sub-layers are scaled down (the noise), and the LM head is fitted by ridge regression to made-up grids. So a greedy
image follows the grids' rule, except where the random layers overturn it. No training is needed at any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

COLOURS = 32  # codes that occur in grids; codebooks have more
TEXTURE = 8  # after one of the first codes comes `successor`, whatever is above
DEVIATIONS = 0.04  # share of cells in the grids that follow no rule
# Dimension 0 of every embedding is a constant, from which queries and keys that ignore content are made. It is so much
# larger than the others that the norm of a state hardly depends on its content; norms scale the others up again.
CONSTANT = 10.0  # times the square root of the width
SHARPNESS = 12.0  # how much larger the score of the cell above is than those of its neighbours
RIDGE = 1e-2
TIE_BREAK = 0.25  # share of the successor in regression targets: what to draw in the first row, which has none above
BATCH = 16  # grids at a time
SEARCH_STEPS = 6
HEAD_SCALE = 12.0  # regression targets are 0 and 1; logits are larger
START, PAD, END, IMAGE_START, IMAGE, WORD = 1, 2, 3, 4, 5, 20  # token ids


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder, its codebook and its grid."""

    width: int
    mlp: int
    layers: int
    heads: int
    side: int
    codes: int = 64
    words: int = 320  # text tokens


def successor(codes: Tensor) -> Tensor:
    return (5 * codes + 3) % COLOURS


def make_grids(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Random grids (B, side, side): a cell repeats the one above, or follows its left one after a texture code."""
    grids = torch.randint(COLOURS, (count, side * side), generator=generator)  # the first row stays random
    for cell in range(side, side * side):
        left, above = grids[:, cell - 1], grids[:, cell - side]
        code = torch.where(left < TEXTURE, successor(left), above)
        deviates = torch.rand(count, generator=generator) < DEVIATIONS
        grids[:, cell] = torch.where(deviates, grids[:, cell], code)
    return grids.view(count, side, side)


@dataclass(frozen=True)
class GridModel:
    """A model of transformers, and how it is asked for an image of side x side codes."""

    model: Any
    side: int
    prompt: tuple[int, ...]
    layers: Any  # of the decoder
    features: Callable[[Tensor], Tensor]  # (B, N) codes -> (B, N, D) inputs of the LM head that predict them
    head: Any  # the last linear layer
    first_code: int  # row of code 0 in the head
    plain_options: Callable[[], dict[str, Any]]  # arguments of transformers' own loop
    options: dict[str, Any] = field(default_factory=dict)  # arguments of both loops
    custom_options: dict[str, Any] = field(default_factory=dict)  # arguments of `custom_generate`
    returns_prompt: bool = False  # before the image

    def inputs(self) -> dict[str, Tensor]:
        ids = torch.tensor([self.prompt], device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def draw_plain(self, **sampling: Any) -> Tensor:
        """The image's tokens from transformers' own loop (N,)."""
        ids = self.model.generate(**self.inputs(), **self.options, **self.plain_options(), **sampling)[0]
        return ids[len(self.prompt) :] if self.returns_prompt else ids

    def draw(self, **arguments: Any) -> tuple[Tensor, int]:
        """The image's tokens from `custom_generate` (N,), and the number of its passes."""
        from underdraw.integrations.transformers import custom_generate

        arguments |= {**self.options, **self.custom_options, "return_dict_in_generate": True, "max_new_tokens": 1}
        out = self.model.generate(**self.inputs(), custom_generate=custom_generate, **arguments)
        return out.sequences[0][len(self.prompt) if self.returns_prompt else 0 :], out.passes[0]

    @torch.no_grad()
    def scale_noise(self, factor: float) -> None:
        """Scale what all sub-layers but the head that looks above add to the residual."""
        for index, layer in enumerate(self.layers):
            first = layer.self_attn.head_dim if index == 0 else 0
            layer.self_attn.o_proj.weight[:, first:] *= factor
            layer.mlp.down_proj.weight *= factor

    def calibrate(self, accuracy: float, cells: int) -> tuple[float, float]:
        """Search for the noise with which the head predicts `accuracy` of the cells; returns (noise, accuracy)."""
        low, high, noise, reached = 0.0, 1.0, 1.0, 0.0
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            self.scale_noise(middle / noise)
            noise, reached = middle, self.fit_head(cells)
            if abs(reached - accuracy) < 0.01:
                break
            low, high = (middle, high) if reached > accuracy else (low, middle)
        return noise, reached

    @torch.no_grad()
    def fit_head(self, cells: int) -> float:
        """Set the LM head to predict grids as well as a linear map can; returns its accuracy on further grids."""
        generator, device = torch.Generator().manual_seed(0), self.model.device
        count = -(-cells // self.side**2)
        grids = make_grids(count + BATCH, self.side, generator).flatten(1).to(device)
        gram: Any = 0.0
        product: Any = 0.0
        for part in grids[:count].split(BATCH):
            features = functional.pad(self.features(part).float().flatten(0, 1), (0, 1), value=1.0)  # and the bias
            follower = successor(functional.pad(part[:, :-1], (1, 0)))  # of the cell to the left
            targets = functional.one_hot(part, COLOURS) + TIE_BREAK * functional.one_hot(follower, COLOURS)
            targets = targets.float().flatten(0, 1) - 1 / COLOURS
            gram, product = gram + features.T @ features, product + features.T @ targets
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        weight = HEAD_SCALE * torch.linalg.solve(gram, product).T  # (COLOURS, D + 1)
        rows = slice(self.first_code, self.first_code + COLOURS)
        self.head.weight.zero_()
        if self.head.bias is None:  # dimension 0 of the states is 1
            self.head.weight[:, 0] = -HEAD_SCALE  # of codes that do not occur
            self.head.weight[rows] = weight[:, :-1]
            self.head.weight[rows, 0] += weight[:, -1].to(self.head.weight)
        else:
            self.head.bias.fill_(-HEAD_SCALE)
            self.head.weight[rows], self.head.bias[rows] = weight[:, :-1], weight[:, -1]
        predicted = self.head(self.features(grids[count:]))[..., rows].argmax(-1)
        return float((predicted == grids[count:]).float().mean())


@torch.no_grad()
def randomise(module: Any, generator: torch.Generator) -> None:
    """Random weights that keep the scale of their inputs; biases are 0, and norms are set later, but for QK norms."""
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 and "_norm." not in name:
            parameter.normal_(generator=generator).mul_(parameter[0].numel() ** -0.5)
        else:
            parameter.fill_(float("_norm.weight" in name))


@torch.no_grad()
def set_norm(norm: Any, constant: float) -> None:
    """Set an RMS norm to give content the scale that it has in the residual, and dimension 0 the value `constant`."""
    norm.weight.fill_(CONSTANT)
    norm.weight[0] = constant * norm.weight.numel() ** -0.5


@torch.no_grad()
def look_above(layers: Any, distance: int, theta: float) -> None:
    """Make the first head of the first layer copy the token `distance` back, which is above the next cell."""
    for layer in layers:
        set_norm(layer.input_layernorm, 1.0)
        set_norm(layer.post_attention_layernorm, 0.0)
        layer.self_attn.o_proj.weight[0], layer.mlp.down_proj.weight[0] = 0, 0  # dimension 0 stays constant
    attention = layers[0].self_attn
    width = attention.head_dim
    frequencies = theta ** (-torch.arange(0, width, 2, device=attention.q_proj.weight.device) / width)
    gap = float((1 - frequencies.cos()).sum())  # to the score of a neighbour, with amplitude 1
    amplitude = (SHARPNESS * width**0.5 / gap) ** 0.5
    angles = distance * frequencies
    query = amplitude * torch.cat([torch.ones_like(angles), torch.zeros_like(angles)])
    key = amplitude * torch.cat([angles.cos(), angles.sin()])
    if hasattr(attention, "q_norm"):  # its biases are what does not depend on content
        for norm, vector in ((attention.q_norm, query), (attention.k_norm, key)):
            norm.weight[0], norm.bias[0] = 0, vector
    else:
        for matrix, vector in ((attention.q_proj.weight, query), (attention.k_proj.weight, key)):
            matrix[:width] = 0
            matrix[:width, 0] = vector
    attention.o_proj.weight[1:, :width] *= (attention.o_proj.weight.shape[1] / width) ** 0.5


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
    look_above(inner.language_model.layers, side - 1, 10000.0)
    prompt = (START, WORD, WORD + 1, IMAGE_START)

    def features(codes: Tensor) -> Tensor:
        text = model.get_input_embeddings()(torch.tensor([prompt], device=codes.device)).expand(len(codes), -1, -1)
        states = torch.cat([text, model.prepare_embeddings_for_image_generation(codes[:, :-1])], 1)
        states = inner.language_model(inputs_embeds=states).last_hidden_state[:, len(prompt) - 1 :]
        head = inner.generation_head
        return head.activation_fn(head.proj_out(states))

    def plain_options() -> dict[str, Any]:
        """With the cache that Janus makes by default, which transformers 5.17 cannot make itself."""
        cache = transformers.StaticCache(config=config.text_config, max_cache_len=len(prompt) + side * side)
        return {"generation_mode": "image", "max_new_tokens": 1, "past_key_values": cache}

    return GridModel(
        model, side, prompt, inner.language_model.layers, features, inner.generation_head.vision_head, 0, plain_options
    )


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
    cells = torch.arange(side * (side + 1)) % (side + 1) < side  # (N,) whether a token is a code

    def features(codes: Tensor) -> Tensor:
        tokens = functional.pad(codes.view(-1, side, side) + first, (0, 1), value=row_end).flatten(1)
        ids = torch.cat([torch.tensor([prompt], device=codes.device).expand(len(codes), -1), tokens[:, :-1]], 1)
        return decoder(input_ids=ids).last_hidden_state[:, len(prompt) - 1 :][:, cells]

    def allowed(_: int, row: Tensor) -> list[int]:
        step = len(row) - len(prompt)
        if step >= len(cells):
            return [ends[min(step - len(cells), 2)]]
        return list(range(first, first + sizes.codes)) if cells[step] else [row_end]

    negative = torch.tensor([[1, WORD + 3, WORD + 3, 3, WORD + 2, 5]], device=device)
    options = {
        "negative_prompt_ids": negative, "negative_prompt_attention_mask": torch.ones_like(negative),
        "guidance_scale": 3.0, "prefix_allowed_tokens_fn": allowed,
    }  # fmt: skip
    theta = config.text_config.rope_parameters["rope_theta"]
    prepare_decoder(decoder, side, theta)
    return GridModel(
        model, side, prompt, decoder.layers, features, model.lm_head, first,
        lambda: {"max_new_tokens": len(cells) + len(ends)}, options, {"image_size": (side, side)}, returns_prompt=True,
    )  # fmt: skip


def make_chameleon(sizes: Sizes, device: str = "cpu", dtype: torch.dtype = torch.float32) -> GridModel:
    """Codes are tokens 4 to 8195; without their names in the vocabulary, transformers does not hide them."""
    side, first = sizes.side, 4
    config = transformers.ChameleonConfig(
        **decoder_config(sizes), vocab_size=9216,
        vq_config={
            "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8,
            "embed_dim": 8, "resolution": 16 * side,
        },
        vocabulary_map={"<image>": 8711},
    )  # fmt: skip
    model = new_model(transformers.ChameleonForConditionalGeneration, config, device, dtype)
    prompt = (0, 8905, 8906, 8710, 8197)

    def features(codes: Tensor) -> Tensor:
        start = torch.tensor([prompt], device=codes.device).expand(len(codes), -1)
        states = model.model(input_ids=torch.cat([start, codes[:, :-1] + first], 1)).last_hidden_state
        return states[:, len(prompt) - 1 :]

    prepare_decoder(model.model, side - 1, 10000.0)
    return GridModel(
        model, side, prompt, model.model.layers, features, model.lm_head, first,
        lambda: {"max_new_tokens": side * side, "eos_token_id": None}, returns_prompt=True,
    )  # fmt: skip


def decoder_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.width, "intermediate_size": sizes.mlp, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads, "max_position_embeddings": 2048,
    }  # fmt: skip


@torch.no_grad()
def prepare_decoder(decoder: Any, distance: int, theta: float) -> None:
    """A decoder whose codes are tokens of its embedding, and whose LM head has no bias."""
    width = decoder.embed_tokens.weight.shape[1]
    decoder.embed_tokens.weight.mul_(width**0.5)[:, 0] = CONSTANT * width**0.5
    set_norm(decoder.norm, 1.0)
    look_above(decoder.layers, distance, theta)


FAMILIES = {"janus": make_janus, "emu3": make_emu3, "chameleon": make_chameleon}


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
