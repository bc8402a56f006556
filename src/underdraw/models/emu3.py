"""Emu3-Gen: one vocabulary for text and image, a size header, rows with end tokens.

It is published in two layouts: that of transformers, and BAAI's, with the image tokenizer in a repository of its own.
The negative prompt is a separate sequence, with its own length and positions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.io import read_text
from underdraw.layout import Layout
from underdraw.models import weight_map
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, ModelSpec
from underdraw.models.text_tokenizers import Encode, load_text_tokenizer, load_tiktoken
from underdraw.models.transformers_layout import decoder_arch, max_positions
from underdraw.models.vqgan_checkpoint import MOVQ, MOVQ_TRANSFORMERS, vqgan_destinations
from underdraw.models.weight_map import HF_DECODER, HF_HEAD, Destinations, allocate, copy_weights
from underdraw.nn.target import DecoderTarget
from underdraw.protocols import Prompt
from underdraw.tokenizers.movq import VideoVQ
from underdraw.tokenizers.vqgan import VQArch

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
# How the authors split text before BPE; the tokenizer.json of the conversion to transformers has another pattern.
TEXT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The special tokens of BAAI's tokenizer, in front of those for images.
TEXT_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205)))
IMAGE_TOKENIZER = "BAAI/Emu3-VisionTokenizer"  # where BAAI publishes it
# From BAAI's names of the image tokenizer's configuration to those of transformers.
IMAGE_CONFIG_NAMES = {
    "ch": "base_channels",
    "ch_mult": "channel_multiplier",
    "z_channels": "latent_channels",
    "double_z": "double_latent",
}
ASPECT_RATIOS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16), (3, 2), (2, 3))  # width to height
DOWNSAMPLE = 8  # pixels per code of the published model
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
COUNTERS = r".*\.num_batches_tracked$"  # of BatchNorm
BAAI_PREFIXES = TensorPrefixes("model.", "", "")
SPECIAL_TOKENS = {  # field of Emu3Tokens: name in transformers' vocabulary map, key of BAAI's config.json, published id
    "start": ("<|extra_203|>", "bos_token_id", 151849),
    "end": ("<|extra_204|>", "eos_token_id", 151850),
    "image_start": ("<|image start|>", "boi_token_id", 151852),
    "image_end": ("<|image end|>", "eoi_token_id", 151853),
    "image": ("<|image token|>", "img_token_id", 151851),
    "row_end": ("<|extra_200|>", "eol_token_id", 151846),
    "frame_end": ("<|extra_201|>", "eof_token_id", 151847),
}
FIRST_CODE = 151854  # token id of the published model


@dataclass(frozen=True, slots=True)
class Emu3Tokens:
    """Ids of the special tokens and of the image codes."""

    start: int
    end: int
    image_start: int
    image_end: int
    image: int
    row_end: int
    frame_end: int
    codes: range


def special_tokens(config: Mapping[str, Any], code_count: int) -> Emu3Tokens:
    """Read the ids from a configuration; where it has none, use those of the published model.

    In BAAI's layout the image codes are the last tokens of the vocabulary.
    """
    if is_baai(config):
        ids = {field: int(config.get(key, published)) for field, (_, key, published) in SPECIAL_TOKENS.items()}
        vocab_size = int(config.get("vocab_size", DEFAULTS["vocab_size"]))
        return Emu3Tokens(**ids, codes=range(max(ids.values()) + 1, vocab_size))
    vocabulary = config.get("vocabulary_map") or {}
    ids = {field: int(vocabulary.get(name, published)) for field, (name, _, published) in SPECIAL_TOKENS.items()}
    first = int(vocabulary.get("<|visual token 000000|>", FIRST_CODE))
    codes = range(first, first + code_count)
    last = int(vocabulary.get(f"<|visual token {code_count - 1:06d}|>", codes.stop - 1))
    if last != codes.stop - 1:
        raise CheckpointError(f"the image tokens span ids {first} to {last}, which are not {code_count} in a row.")
    return Emu3Tokens(**ids, codes=codes)


def is_baai(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is BAAI's own; that of transformers has another model_type and a text_config."""
    return config.get("model_type") == "Emu3"


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "emu3" or is_baai(checkpoint.config)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config if is_baai(config) else (config.get("text_config") or {})


def image_tokenizer_arch(config: Mapping[str, Any], name: str) -> VQArch:
    """The image tokenizer of a configuration in the layout of transformers; `name` is used in error messages."""
    values = {**IMAGE_DEFAULTS, **config}
    if values.get("num_attention_heads", 1) != 1 or values.get("double_latent"):
        raise UnsupportedError(
            f"{name} has an image tokenizer with {values.get('num_attention_heads', 1)} attention heads, "
            f"double_latent={bool(values.get('double_latent'))}; only 1 head and False are supported."
        )
    return VQArch(
        widths=tuple(values["base_channels"] * factor for factor in values["channel_multiplier"]),
        blocks=values["num_res_blocks"],
        latent=values["latent_channels"],
        codes=values["codebook_size"],
        code_dim=values["embed_dim"],
        attention=tuple(values["attn_resolutions"] or ()),
        spatial_norm=True,
        frames=values["temporal_downsample_factor"],
    )


def list_sizes(area: int, downsample: int) -> tuple[ImageSize, ...]:
    """The size closest to `area` pixels for each aspect ratio, in whole codes of `downsample` pixels."""
    sizes = []
    for width, height in ASPECT_RATIOS:
        unit = (area / (width * height)) ** 0.5 / downsample
        sizes.append(ImageSize(round(height * unit) * downsample, round(width * unit) * downsample))
    return tuple(dict.fromkeys(sizes))


def make_layout(size: ImageSize, downsample: int, tokens: Emu3Tokens) -> Layout:
    return Layout(
        size.height // downsample,
        size.width // downsample,
        tokens.codes,
        row_end=tokens.row_end,
        epilogue=(tokens.frame_end, tokens.image_end, tokens.end),
    )


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    config = checkpoint.config
    # BAAI's image tokenizer has a configuration of its own, in another repository; the published one is the default.
    images = image_tokenizer_arch(config.get("vq_config") or {}, checkpoint.name)
    tokens = special_tokens(config, images.codes)
    return ModelSpec(
        arch=replace(decoder_arch(text_config(config), DEFAULTS, checkpoint.name), outputs=tokens.codes),
        defaults=SamplingDefaults(guidance=3.0, top_k=2048),
        sizes=list_sizes(int(config.get("image_area", IMAGE_AREA)), images.downsample),
        make_layout=lambda size: make_layout(size, images.downsample, tokens),
        max_positions=max_positions(text_config(config), DEFAULTS),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, config, encode = read_spec(checkpoint), checkpoint.config, _load_text(checkpoint)
    if is_baai(config):
        images = _load_baai_image_tokenizer(checkpoint, placement)
        target = load_decoder(checkpoint, spec, placement, {})
    else:
        images = _allocate_images(config.get("vq_config") or {}, checkpoint.name, placement)
        prefix = tensor_prefixes(checkpoint).image_tokenizer
        destinations = vqgan_destinations(images, checkpoint.shapes(), MOVQ_TRANSFORMERS, prefix)
        target = load_decoder(checkpoint, spec, placement, destinations)
    tokens = special_tokens(config, images.arch.codes)

    def encode_prompt(text: str, size: ImageSize) -> tuple[int, ...]:
        grid = f"{size.height // images.downsample}*{size.width // images.downsample}"
        return (tokens.start, *encode(text), tokens.image_start, *encode(grid), tokens.image)

    def make_prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        return Prompt(encode_prompt(text, size), encode_prompt(NEGATIVE_PROMPT if negative is None else negative, size))

    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


def tensor_prefixes(checkpoint: Checkpoint) -> TensorPrefixes:
    if is_baai(checkpoint.config):
        return BAAI_PREFIXES
    shapes = checkpoint.shapes()
    return next((p for p in TENSOR_PREFIXES if f"{p.decoder}norm.weight" in shapes), TENSOR_PREFIXES[0])


def load_decoder(
    checkpoint: Checkpoint, spec: ModelSpec, placement: Placement, images: Destinations | None = None
) -> DecoderTarget:
    """Load the decoder, and the image tokenizer of the same files if its destinations are given."""
    prefixes = tensor_prefixes(checkpoint)
    rules = {prefixes.decoder: HF_DECODER, prefixes.head: [HF_HEAD]}
    skipped = [re.escape(prefixes.image_tokenizer)] if images is None else []
    return weight_map.load_decoder(checkpoint, spec, placement, rules, others=images, ignored=[COUNTERS, *skipped])


def _load_text(checkpoint: Checkpoint) -> Encode:
    if not is_baai(checkpoint.config):
        return load_text_tokenizer(checkpoint.require_file("tokenizer.json"), TEXT_PATTERN).encode
    of_images = read_text(checkpoint.require_file("emu3_vision_tokens.txt"), "names of tokens", CheckpointError).split(
        "\n"
    )
    names = [*TEXT_SPECIALS, *(name.strip() for name in of_images if name.strip())]
    return load_tiktoken(checkpoint.require_file("emu3.tiktoken"), TEXT_PATTERN, names)


def _allocate_images(config: Mapping[str, Any], name: str, placement: Placement) -> VideoVQ:
    arch = image_tokenizer_arch(config, name)
    return allocate(lambda: VideoVQ(arch), Placement(placement.device, torch.float32))


def _load_baai_image_tokenizer(checkpoint: Checkpoint, placement: Placement) -> VideoVQ:
    """Load BAAI/Emu3-VisionTokenizer."""
    path = checkpoint.find_or_download([IMAGE_TOKENIZER.rpartition("/")[2]], IMAGE_TOKENIZER)
    files = Checkpoint.from_path(path)
    images = _allocate_images(
        {IMAGE_CONFIG_NAMES.get(key, key): value for key, value in files.config.items()}, files.name, placement
    )
    copy_weights(files, vqgan_destinations(images, files.shapes(), MOVQ), [COUNTERS])
    return images


FAMILY = Family(
    name="emu3",
    summary="Emu3-Gen 8B, in BAAI's layout or that of transformers: about 720x720 px, 90x90 codes or other shapes",
    published=(
        PublishedCheckpoint("BAAI/Emu3-Gen", "apache-2.0", "needs BAAI/Emu3-VisionTokenizer"),
        PublishedCheckpoint("Emu3-community/Emu3-Gen-hf", "apache-2.0"),
        PublishedCheckpoint("BAAI/Emu3-Gen-hf", "apache-2.0"),
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=_load_text,
)
