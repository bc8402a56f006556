"""Janus-Pro: a Llama decoder with a separate embedding and head for image codes. 384x384 pixels, 24x24 codes.

It is published in two layouts: DeepSeek's and that of transformers.
Our vocabulary is the text tokens, then the image codes. The checkpoint embeds a code by a small network (the aligner)
that sees nothing but the code, so its outputs are computed once and stored as rows of the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.layout import Layout
from underdraw.models import weight_map
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, MakePrompt, ModelSpec
from underdraw.models.text_tokenizers import load_text_tokenizer
from underdraw.models.transformers_layout import decoder_arch, max_positions, with_defaults
from underdraw.models.vqgan_checkpoint import JANUS, LLAMAGEN, VQGANFormat, allocate_vqgan
from underdraw.models.weight_map import HF_DECODER, Destinations, WeightDestination, WeightRule, allocate
from underdraw.nn.target import DecoderTarget
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
# Special tokens; the bars are full-width.
START, PAD, IMAGE_START = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5c\u2581pad\u2581\uff5c>",
    "<begin_of_image>",
)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a layout names the parts of the model."""

    text_config: str  # the decoder's part of config.json
    decoder: str  # prefix
    code_embedding: str
    aligner: str  # prefix
    aligner_layer: Callable[[int], str]  # the name of the i-th linear layer
    head_hidden: str
    head: str
    image_tokenizer: str  # prefix
    image_format: VQGANFormat
    ignored: tuple[str, ...]  # parts for text output and image input, which are not needed here

    def head_rules(self) -> list[WeightRule]:
        return [
            WeightRule(f"{name}.{part}", f"head.{ours}.{part}")
            for name, ours in ((self.head_hidden, "hidden"), (self.head, "out"))
            for part in ("weight", "bias")
        ]


TRANSFORMERS = TensorNames(
    text_config="text_config",
    decoder="model.language_model.",
    code_embedding="model.generation_embeddings.weight",
    aligner="model.generation_aligner.",
    aligner_layer=lambda index: "fc1" if index == 0 else f"hidden_layers.{index - 1}",
    head_hidden="model.generation_head.proj_out",
    head="model.generation_head.vision_head",
    image_tokenizer="model.vqmodel.",
    image_format=JANUS,
    ignored=(r"lm_head\.", r"model\.vision_model\.", r"model\.aligner\."),
)
DEEPSEEK = TensorNames(
    text_config="language_config",
    decoder="language_model.model.",
    code_embedding="gen_embed.weight",
    aligner="gen_aligner.",
    aligner_layer=lambda index: f"layers.{2 * index}",  # activations are counted too
    head_hidden="gen_head.output_mlp_projector",
    head="gen_head.vision_head",
    image_tokenizer="gen_vision_model.",
    image_format=LLAMAGEN,
    ignored=(
        r"language_model\.lm_head\.",
        r"vision_model\.",
        r"aligner\.",
        r"gen_vision_model\.quantize\.codebook_used$",
    ),
)


def matches(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    is_deepseek = config.get("model_type") == "multi_modality" and "gen_vision_config" in config  # JanusFlow has none
    return config.get("model_type") == "janus" or is_deepseek


def tensor_names(checkpoint: Checkpoint) -> TensorNames:
    return TRANSFORMERS if checkpoint.config.get("model_type") == "janus" else DEEPSEEK


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    config, shapes, names = checkpoint.config, checkpoint.shapes(), tensor_names(checkpoint)
    _check_activation(checkpoint)
    text = decoder_arch(config.get(names.text_config), DEFAULTS, checkpoint.name)
    for name in (names.code_embedding, f"{names.head_hidden}.weight"):
        if name not in shapes:
            raise CheckpointError(f"{checkpoint.name} lacks {name}; without it Janus cannot generate images.")
    codes = range(text.vocab, text.vocab + shapes[names.code_embedding][0])
    side, pixels = _read_side(config, shapes, names)
    return ModelSpec(
        arch=replace(text, vocab=codes.stop, outputs=codes, head_hidden=shapes[f"{names.head_hidden}.weight"][0]),
        defaults=SamplingDefaults(guidance=5.0),
        sizes=(ImageSize(pixels, pixels),),
        make_layout=lambda _: Layout(side, side, codes),
        max_positions=max_positions(config.get(names.text_config), DEFAULTS),
    )


def _check_activation(checkpoint: Checkpoint) -> None:
    """Raise an UnsupportedError if aligner and head have another activation than GELU."""
    activation = (checkpoint.config.get("vq_config") or {}).get("hidden_act", "gelu")
    if activation != "gelu":
        raise UnsupportedError(f"{checkpoint.name} has vq_config.hidden_act {activation!r}; only gelu is supported.")


def _read_side(config: Mapping[str, Any], shapes: Mapping[str, torch.Size], names: TensorNames) -> tuple[int, int]:
    """The side of the image in codes and in pixels."""
    vision = config.get("vision_config") or {}
    if names is TRANSFORMERS:
        values = with_defaults(vision, {"image_size": 384, "patch_size": 16})
        side = int(values["image_size"]) // int(values["patch_size"])
        upsamplings = len((config.get("vq_config") or {}).get("channel_multiplier", range(5))) - 1
        return side, side * 2**upsamplings
    levels = re.compile(re.escape(names.image_tokenizer) + r"decoder\.conv_blocks\.(\d+)\.")
    upsamplings = max((int(match[1]) for name in shapes if (match := levels.match(name))), default=4)
    pixels = int((vision.get("params") or {}).get("image_size", 384))
    return pixels // 2**upsamplings, pixels


class Aligner(nn.Module):
    """The MLP that turns codebook vectors into decoder embeddings."""

    def __init__(self, codes: int, code_dim: int, dim: int, layers: int) -> None:
        super().__init__()
        self.codes = nn.Embedding(codes, code_dim)
        self.layers = nn.ModuleList(nn.Linear(code_dim if index == 0 else dim, dim) for index in range(layers))

    def destinations(self, names: TensorNames) -> dict[str, WeightDestination]:
        destinations = {names.code_embedding: WeightDestination(self.codes.weight.data)}
        for index, layer in enumerate(self.layers):
            name = names.aligner + names.aligner_layer(index)
            destinations |= {f"{name}.{part}": WeightDestination(p.data) for part, p in layer.named_parameters()}
        return destinations

    def embed_all(self) -> Tensor:
        """The embedding of every code: (codes, dim)."""
        x: Tensor = self.layers[0](self.codes.weight)
        for layer in list(self.layers)[1:]:
            x = layer(torch.nn.functional.gelu(x))
        return x


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, shapes, names = read_spec(checkpoint), checkpoint.shapes(), tensor_names(checkpoint)
    make_prompt = _prompt_builder(checkpoint)
    images, destinations = allocate_vqgan(shapes, names.image_format, placement, names.image_tokenizer)
    target = load_decoder(checkpoint, spec, placement, destinations)
    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


def load_decoder(
    checkpoint: Checkpoint, spec: ModelSpec, placement: Placement, images: Destinations | None = None
) -> DecoderTarget:
    """Load the decoder, and the image tokenizer of the same files if its destinations are given."""
    shapes, names = checkpoint.shapes(), tensor_names(checkpoint)
    codes, code_dim = shapes[names.code_embedding]
    text_size = spec.arch.vocab - codes
    layers = sum(name.startswith(names.aligner) and name.endswith(".weight") for name in shapes)
    aligner = allocate(
        lambda: Aligner(codes, code_dim, spec.arch.dim, layers), Placement(placement.device, torch.float32)
    )
    skipped = [re.escape(names.image_tokenizer)] if images is None else []
    target = weight_map.load_decoder(
        checkpoint,
        spec,
        placement,
        {names.decoder: DECODER_RULES, "": names.head_rules()},
        rows={"text": slice(0, text_size)},
        others={**aligner.destinations(names), **(images or {})},
        ignored=[*names.ignored, *skipped],
    )
    target.net.embedding.weight.data[text_size:] = aligner.embed_all()
    return target


def _prompt_builder(checkpoint: Checkpoint) -> MakePrompt:
    """Prompts of one chat turn and the image start token; in the unconditional row the text is replaced by padding."""
    tokenizer = load_text_tokenizer(checkpoint.require_file("tokenizer.json"))
    text_config = with_defaults(checkpoint.config.get(tensor_names(checkpoint).text_config), DEFAULTS)
    generation = checkpoint.read_json("generation_config.json")
    image_start = (generation.get("generation_kwargs") or {}).get("boi_token_id")
    image_start = tokenizer.token_id(IMAGE_START) if image_start is None else int(image_start)
    pad: int | None
    if tensor_names(checkpoint) is DEEPSEEK:
        start, pad = tokenizer.token_id(START), tokenizer.token_id(PAD)
    else:
        start = int(generation.get("bos_token_id", text_config["bos_token_id"]))
        pad = generation.get("pad_token_id", text_config.get("pad_token_id"))
    if pad is None:
        raise CheckpointError(f"{checkpoint.name} has no pad_token_id; add it to its generation_config.json.")

    def encode_prompt(text: str) -> tuple[int, ...]:
        return (start, *tokenizer.encode(f"<|User|>: {text.strip()}\n\n<|Assistant|>:"), image_start)

    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        condition = encode_prompt(text)
        no_text = (start, *[int(pad)] * (len(condition) - 2), image_start)
        return Prompt(condition, no_text if negative is None else encode_prompt(negative))

    return make_prompt


FAMILY = Family(
    name="janus",
    summary="Janus-Pro 1B and 7B, in DeepSeek's layout or that of transformers: 384 px, 24x24 codes",
    published=(
        PublishedCheckpoint("deepseek-ai/Janus-Pro-7B", "DeepSeek Model License"),
        PublishedCheckpoint("deepseek-ai/Janus-Pro-1B", "DeepSeek Model License"),
        PublishedCheckpoint("deepseek-community/Janus-Pro-7B", "DeepSeek Model License"),
        PublishedCheckpoint("deepseek-community/Janus-Pro-1B", "DeepSeek Model License"),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=_prompt_builder,
)
