"""Emu3-Gen in the layout of transformers: one vocabulary for text and image, a size header, rows with end tokens.

The negative prompt is a separate sequence, with its own length and positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from underdraw.errors import CheckpointError
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import (
    Family,
    ImageSize,
    LoadedModel,
    ModelSpec,
    Placement,
    PublishedCheckpoint,
    SamplingDefaults,
)
from underdraw.models.transformers_layout import ROPE_BUFFERS, decoder_arch, load_text_tokenizer, with_defaults
from underdraw.models.weight_map import (
    HF_DECODER,
    HF_HEAD,
    allocate,
    copy_weights,
    decoder_destinations,
    module_destinations,
)
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Transformer
from underdraw.protocols import Prompt
from underdraw.tokenizers.movq import VideoVQ, VideoVQArch

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 184622,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
IMAGE_DEFAULTS: Mapping[str, Any] = {
    "codebook_size": 32768,
    "embed_dim": 4,
    "latent_channels": 4,
    "temporal_downsample_factor": 4,
    "base_channels": 256,
    "channel_multiplier": (1, 2, 2, 4),
    "num_res_blocks": 2,
    "attn_resolutions": (3,),
}
ASPECT_RATIOS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16), (3, 2), (2, 3))  # width to height
IMAGE_AREA = 720 * 720  # pixels, for every aspect ratio
NEGATIVE_PROMPT = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


@dataclass(frozen=True, slots=True)
class TensorPrefixes:
    """Where a version of transformers puts the parts of the model."""

    decoder: str
    head: str
    image_tokenizer: str


TENSOR_PREFIXES = (
    TensorPrefixes("model.text_model.", "", "model.vqmodel."),
    TensorPrefixes("text_model.model.", "text_model.", "vqmodel."),  # transformers 4.48 to 4.51
)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the special tokens and of the image codes."""

    start: int
    end: int
    image_start: int
    image_end: int
    image: int
    row_end: int
    frame_end: int
    codes: range


def special_tokens(config: Mapping[str, Any], code_count: int) -> SpecialTokens:
    """Read the ids from the configuration's vocabulary map; where it has none, use those of the published model."""
    vocabulary = config.get("vocabulary_map") or {}

    def token_id(name: str, published: int) -> int:
        return int(vocabulary.get(name, published))

    first = token_id("<|visual token 000000|>", 151854)
    codes = range(first, first + code_count)
    last = token_id(f"<|visual token {code_count - 1:06d}|>", codes.stop - 1)
    if last != codes.stop - 1:
        raise CheckpointError(f"the image tokens span ids {first} to {last}, which are not {code_count} in a row.")
    return SpecialTokens(
        start=token_id("<|extra_203|>", 151849),
        end=token_id("<|extra_204|>", 151850),
        image_start=token_id("<|image start|>", 151852),
        image_end=token_id("<|image end|>", 151853),
        image=token_id("<|image token|>", 151851),
        row_end=token_id("<|extra_200|>", 151846),
        frame_end=token_id("<|extra_201|>", 151847),
        codes=codes,
    )


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "emu3"


def image_tokenizer_arch(config: Mapping[str, Any]) -> VideoVQArch:
    values = {**IMAGE_DEFAULTS, **(config.get("vq_config") or {})}
    return VideoVQArch(
        widths=tuple(values["base_channels"] * factor for factor in values["channel_multiplier"]),
        blocks=values["num_res_blocks"],
        latent=values["latent_channels"],
        codes=values["codebook_size"],
        code_dim=values["embed_dim"],
        attention=tuple(values["attn_resolutions"] or ()),
        frames=values["temporal_downsample_factor"],
    )


def list_sizes(area: int, downsample: int) -> tuple[ImageSize, ...]:
    """The size closest to `area` pixels for each aspect ratio, in whole codes of `downsample` pixels."""
    sizes = []
    for width, height in ASPECT_RATIOS:
        unit = (area / (width * height)) ** 0.5 / downsample
        sizes.append(ImageSize(round(height * unit) * downsample, round(width * unit) * downsample))
    return tuple(dict.fromkeys(sizes))


def make_layout(size: ImageSize, downsample: int, tokens: SpecialTokens) -> Layout:
    return Layout(
        size.height // downsample,
        size.width // downsample,
        tokens.codes,
        row_end=tokens.row_end,
        epilogue=(tokens.frame_end, tokens.image_end, tokens.end),
    )


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    config = checkpoint.config
    images = image_tokenizer_arch(config)
    tokens = special_tokens(config, images.codes)
    return ModelSpec(
        arch=replace(decoder_arch(config.get("text_config"), DEFAULTS, checkpoint.name), outputs=tokens.codes),
        defaults=SamplingDefaults(guidance=3.0, top_k=2048),
        sizes=list_sizes(int(config.get("image_area", IMAGE_AREA)), images.downsample),
        make_layout=lambda size: make_layout(size, images.downsample, tokens),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, config, shapes = read_spec(checkpoint), checkpoint.config, checkpoint.shapes()
    encode = load_text_tokenizer(checkpoint.require_file("tokenizer.json"))
    prefixes = next((p for p in TENSOR_PREFIXES if f"{p.decoder}norm.weight" in shapes), TENSOR_PREFIXES[0])
    net = allocate(lambda: Transformer(spec.arch), placement)
    image_arch = image_tokenizer_arch(config)
    images = allocate(lambda: VideoVQ(image_arch), Placement(placement.device, torch.float32))
    # Scalars are the batch counters of BatchNorm.
    in_images = {
        name: to for name, to in module_destinations(images, prefixes.image_tokenizer).items() if to.memory.ndim
    }
    destinations = {
        **decoder_destinations(net, HF_DECODER, prefixes.decoder),
        **decoder_destinations(net, [HF_HEAD], prefixes.head),
        **in_images,
    }
    copy_weights(checkpoint, destinations, [ROPE_BUFFERS, r".*\.num_batches_tracked$"])
    tokens = special_tokens(config, image_arch.codes)
    max_positions = with_defaults(config.get("text_config"), DEFAULTS)["max_position_embeddings"]

    def encode_prompt(text: str, size: ImageSize) -> tuple[int, ...]:
        grid = f"{size.height // image_arch.downsample}*{size.width // image_arch.downsample}"
        return (tokens.start, *encode(text), tokens.image_start, *encode(grid), tokens.image)

    def make_prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        return Prompt(encode_prompt(text, size), encode_prompt(NEGATIVE_PROMPT if negative is None else negative, size))

    target = DecoderTarget(net, positions=int(max_positions))
    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


FAMILY = Family(
    name="emu3",
    summary="Emu3-Gen 8B in the layout of transformers: about 720x720 px, 90x90 codes or as many in another shape",
    published=(
        PublishedCheckpoint("Emu3-community/Emu3-Gen-hf", "apache-2.0"),
        PublishedCheckpoint("BAAI/Emu3-Gen-hf", "apache-2.0"),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
)
