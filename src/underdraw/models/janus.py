"""Janus-Pro: a Llama decoder with a separate embedding and head for image codes. 384x384 pixels, 24x24 codes.

Our vocabulary is the text tokens, then the image codes. The checkpoint embeds a code by a small network (the aligner)
that sees nothing but the code, so its outputs are computed once and stored as rows of the embedding.
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
from underdraw.models.transformers_layout import (
    ROPE_BUFFERS,
    decoder_arch,
    load_text_tokenizer,
    special_token_id,
    with_defaults,
)
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
DECODER_RULES = (WeightRule("embed_tokens.weight", "embedding.weight", rows="text"), *HF_DECODER[1:])
HEAD_RULES = (
    WeightRule("proj_out.weight", "head.hidden.weight"),
    WeightRule("proj_out.bias", "head.hidden.bias"),
    WeightRule("vision_head.weight", "head.out.weight"),
    WeightRule("vision_head.bias", "head.out.bias"),
)
# Parts for text output and image input, which are not needed here.
IGNORED = [ROPE_BUFFERS, r"lm_head\.", r"model\.vision_model\.", r"model\.aligner\."]
IMAGE_START = "<begin_of_image>"
_CODE_EMBEDDING = "model.generation_embeddings.weight"
_ALIGNER = "model.generation_aligner."
_HEAD = "model.generation_head."


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "janus"


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    config, shapes = checkpoint.config, checkpoint.shapes()
    text = decoder_arch(config.get("text_config"), DEFAULTS, checkpoint.name)
    for name in (_CODE_EMBEDDING, f"{_HEAD}proj_out.weight"):
        if name not in shapes:
            raise CheckpointError(f"{checkpoint.name} lacks {name}; without it Janus cannot generate images.")
    codes = range(text.vocab, text.vocab + shapes[_CODE_EMBEDDING][0])
    vision = with_defaults(config.get("vision_config"), {"image_size": 384, "patch_size": 16})
    side = int(vision["image_size"]) // int(vision["patch_size"])
    upsamplings = len((config.get("vq_config") or {}).get("channel_multiplier", range(5))) - 1
    return ModelSpec(
        arch=replace(text, vocab=codes.stop, outputs=codes, head_hidden=shapes[f"{_HEAD}proj_out.weight"][0]),
        defaults=SamplingDefaults(guidance=5.0),
        sizes=(ImageSize(side * 2**upsamplings, side * 2**upsamplings),),
        make_layout=lambda _: Layout(side, side, codes),
    )


class Aligner(nn.Module):
    """The MLP that turns codebook vectors into decoder embeddings."""

    def __init__(self, codes: int, code_dim: int, dim: int, layers: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, code_dim)
        self.layers = nn.ModuleList(nn.Linear(code_dim if index == 0 else dim, dim) for index in range(layers))

    def destinations(self) -> dict[str, WeightDestination]:
        destinations = {_CODE_EMBEDDING: WeightDestination(self.codes.weight.data)}
        for index, layer in enumerate(self.layers):
            name = _ALIGNER + ("fc1" if index == 0 else f"hidden_layers.{index - 1}")
            destinations |= {f"{name}.{part}": WeightDestination(p.data) for part, p in layer.named_parameters()}
        return destinations

    def embed_all(self) -> Tensor:
        """The embedding of every code: (codes, dim)."""
        x: Tensor = self.layers[0](self.codes.weight)
        for layer in list(self.layers)[1:]:
            x = layer(torch.nn.functional.gelu(x))
        return x


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, shapes = read_spec(checkpoint), checkpoint.shapes()
    net = allocate(lambda: Transformer(spec.arch), placement)
    codes, code_dim = shapes[_CODE_EMBEDDING]
    text_size = spec.arch.vocab - codes
    layers = sum(name.startswith(_ALIGNER) and name.endswith(".weight") for name in shapes)
    aligner = allocate(
        lambda: Aligner(codes, code_dim, spec.arch.dim, layers), Placement(placement.device, torch.float32)
    )
    images, image_destinations = vqgan_destinations(shapes, JANUS, placement, "model.vqmodel.")
    destinations = {
        **decoder_destinations(net, DECODER_RULES, "model.language_model.", {"text": slice(0, text_size)}),
        **decoder_destinations(net, HEAD_RULES, _HEAD),
        **aligner.destinations(),
        **image_destinations,
    }
    copy_weights(checkpoint, destinations, IGNORED)
    net.embedding.weight.data[text_size:] = aligner.embed_all()
    text_config = with_defaults(checkpoint.config.get("text_config"), DEFAULTS)
    target = DecoderTarget(net, positions=int(text_config["max_position_embeddings"]))
    return spec.build(FAMILY.name, checkpoint, target, images, _prompt_builder(checkpoint, text_config))


def _prompt_builder(checkpoint: Checkpoint, text_config: Mapping[str, Any]) -> MakePrompt:
    """Prompts of one chat turn and the image start token; in the unconditional row the text is replaced by padding."""
    tokenizer = checkpoint.require_file("tokenizer.json")
    encode, generation = load_text_tokenizer(tokenizer), checkpoint.read_json("generation_config.json")
    start = int(generation.get("bos_token_id", text_config["bos_token_id"]))
    image_start = (generation.get("generation_kwargs") or {}).get("boi_token_id")
    image_start = special_token_id(tokenizer, IMAGE_START) if image_start is None else int(image_start)
    pad = generation.get("pad_token_id", text_config.get("pad_token_id"))
    if pad is None:
        raise CheckpointError(f"{checkpoint.name} has no pad_token_id; add it to its generation_config.json.")

    def encode_prompt(text: str) -> tuple[int, ...]:
        return (start, *encode(f"<|User|>: {text.strip()}\n\n<|Assistant|>:"), image_start)

    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        condition = encode_prompt(text)
        no_text = (start, *[int(pad)] * (len(condition) - 2), image_start)
        return Prompt(condition, no_text if negative is None else encode_prompt(negative))

    return make_prompt


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
