"""Janus-Pro: a Llama decoder whose image tokens have an embedding and a head of their own. 384x384 pixels, 24x24 codes.

Text tokens come first in our vocabulary, image codes behind them. The checkpoint embeds a code through a small network
with nothing but the code as input, so its outputs are computed once and stored as rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from underdraw.errors import CheckpointError
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import (
    Family,
    ImageSize,
    LoadedModel,
    MakePrompt,
    ModelSpec,
    Placement,
    PublishedCheckpoint,
    SamplingDefaults,
)
from underdraw.models.transformers_layout import ROTARY, decoder_arch, special, text_encoder
from underdraw.models.vqgan_checkpoint import JANUS, vqgan_destinations
from underdraw.models.weight_map import (
    HF_DECODER,
    WeightDestination,
    WeightRule,
    allocate,
    copy_weights,
    decoder_destinations,
)
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Transformer
from underdraw.protocols import Prompt

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 100000,
}
DECODER = (WeightRule("embed_tokens.weight", "embedding.weight", part="text"), *HF_DECODER[1:])
HEAD = (
    WeightRule("proj_out.weight", "head.hidden.weight"),
    WeightRule("proj_out.bias", "head.hidden.bias"),
    WeightRule("vision_head.weight", "head.out.weight"),
    WeightRule("vision_head.bias", "head.out.bias"),
)
IGNORED = [ROTARY, r"lm_head\.", r"model\.vision_model\.", r"model\.aligner\."]  # text output, image input
IMAGE_START = "<begin_of_image>"
_EMBEDDING, _ALIGNER, _HEAD = (
    "model.generation_embeddings.weight",
    "model.generation_aligner.",
    "model.generation_head.",
)


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "janus"


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    config, shapes = checkpoint.config, checkpoint.shapes()
    text = decoder_arch(config.get("text_config") or {}, DEFAULTS, checkpoint.name)
    for name in (_EMBEDDING, f"{_HEAD}proj_out.weight"):
        if name not in shapes:
            raise CheckpointError(f"{checkpoint.name} lacks {name}; without it Janus reads pictures and draws none.")
    codes = range(text.vocab, text.vocab + shapes[_EMBEDDING][0])
    vision = {"image_size": 384, "patch_size": 16, **(config.get("vision_config") or {})}
    side = int(vision["image_size"]) // int(vision["patch_size"])
    pixels = side * 2 ** (len((config.get("vq_config") or {}).get("channel_multiplier", range(5))) - 1)
    return ModelSpec(
        arch=replace(text, vocab=codes.stop, outputs=codes, head_hidden=shapes[f"{_HEAD}proj_out.weight"][0]),
        defaults=SamplingDefaults(guidance=5.0),
        sizes=(ImageSize(pixels, pixels),),
        make_layout=lambda _: Layout(side, side, codes),
    )


class Aligner(nn.Module):
    """The network that embeds codes."""

    def __init__(self, codes: int, code_dim: int, dim: int, layers: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, code_dim)
        self.layers = nn.ModuleList(nn.Linear(code_dim if index == 0 else dim, dim) for index in range(layers))

    def slots(self) -> dict[str, WeightDestination]:
        """Where the checkpoint's tensors go."""
        found = {_EMBEDDING: WeightDestination(self.codes.weight.data)}
        for index, layer in enumerate(self.layers):
            name = _ALIGNER + ("fc1" if index == 0 else f"hidden_layers.{index - 1}")
            found |= {f"{name}.{which}": WeightDestination(value.data) for which, value in layer.named_parameters()}
        return found

    def rows(self) -> Tensor:
        """The embedding of every code: (K, dim)."""
        x: Tensor = self.layers[0](self.codes.weight)
        for layer in list(self.layers)[1:]:
            x = layer(torch.nn.functional.gelu(x))
        return x


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, shapes = read_spec(checkpoint), checkpoint.shapes()
    net = allocate(lambda: Transformer(spec.arch), placement)
    codes, code_dim = shapes[_EMBEDDING]
    text = spec.arch.vocab - codes
    layers = sum(name.startswith(_ALIGNER) and name.endswith(".weight") for name in shapes)
    aligner = allocate(
        lambda: Aligner(codes, code_dim, spec.arch.dim, layers), Placement(placement.device, torch.float32)
    )
    images, own = vqgan_destinations(shapes, JANUS, placement, "model.vqmodel.")
    slots = decoder_destinations(net, DECODER, "model.language_model.", {"text": slice(0, text)})
    copy_weights(checkpoint, {**slots, **decoder_destinations(net, HEAD, _HEAD), **aligner.slots(), **own}, IGNORED)
    net.embedding.weight.data[text:] = aligner.rows()
    return spec.build(
        FAMILY.name, checkpoint, DecoderTarget(net, positions=_positions(checkpoint)), images, _prompt(checkpoint)
    )


def _positions(checkpoint: Checkpoint) -> int:
    return int({**DEFAULTS, **(checkpoint.config.get("text_config") or {})}["max_position_embeddings"])


def _prompt(checkpoint: Checkpoint) -> MakePrompt:
    """One turn of talk, then the image's start; the unconditional row has padding in the place of the words."""
    tokenizer = checkpoint.file("tokenizer.json")
    encode, own = text_encoder(tokenizer), checkpoint.settings("generation_config.json")
    text_config = {**DEFAULTS, **(checkpoint.config.get("text_config") or {})}
    start = int(own.get("bos_token_id", text_config["bos_token_id"]))
    image = (own.get("generation_kwargs") or {}).get("boi_token_id")
    image = special(tokenizer, IMAGE_START) if image is None else int(image)
    pad = own.get("pad_token_id", text_config.get("pad_token_id"))
    if pad is None:
        raise CheckpointError(f"{checkpoint.name} names no pad_token_id; add it to its generation_config.json.")

    def row(text: str) -> tuple[int, ...]:
        return (start, *encode(f"<|User|>: {text.strip()}\n\n<|Assistant|>:"), image)

    def prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        condition = row(text)
        padded = (start, *[int(pad)] * (len(condition) - 2), image)
        return Prompt(condition, padded if negative is None else row(negative))

    return prompt


FAMILY = Family(
    name="janus",
    summary="Janus-Pro 1B and 7B in the layout of transformers: 384 px, 24x24 codes",
    published=(
        PublishedCheckpoint("deepseek-community/Janus-Pro-7B", "DeepSeek Model License"),
        PublishedCheckpoint("deepseek-community/Janus-Pro-1B", "DeepSeek Model License"),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
)
