"""Emu3-Gen in the layout of transformers: text and image tokens in one vocabulary, a size header, rows with an end.

The negative prompt is a row of its own, with its own length and positions.
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
from underdraw.models.transformers_layout import ROTARY, decoder_arch, text_encoder
from underdraw.models.weight_map import (
    HF_DECODER,
    WeightRule,
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
RATIOS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16), (3, 2), (2, 3))  # width to height
AREA = 720 * 720  # pixels of every picture, whatever its shape
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
HEAD = WeightRule("lm_head.weight", "head.weight", cut="outputs")


@dataclass(frozen=True, slots=True)
class Version:
    """How a version of transformers names the parts."""

    decoder: str
    head: str
    images: str


VERSIONS = (
    Version("model.text_model.", "", "model.vqmodel."),
    Version("text_model.model.", "text_model.", "vqmodel."),
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of the special tokens, by the names that the tokenizer gives them."""

    start: int
    end: int
    image_start: int
    image_end: int
    image: int
    row_end: int
    frame_end: int
    codes: range


def tokens(config: Mapping[str, Any], count: int) -> Tokens:
    """The configuration's own vocabulary, or the published one where it carries none."""
    names = config.get("vocabulary_map") or {}

    def find(name: str, published: int) -> int:
        return int(names.get(name, published))

    first = find("<|visual token 000000|>", 151854)
    codes = range(first, first + count)
    last = find(f"<|visual token {count - 1:06d}|>", codes.stop - 1)
    if last != codes.stop - 1:
        raise CheckpointError(f"the image tokens lie from {first} to {last}, which are not {count} ids in a row.")
    return Tokens(
        start=find("<|extra_203|>", 151849),
        end=find("<|extra_204|>", 151850),
        image_start=find("<|image start|>", 151852),
        image_end=find("<|image end|>", 151853),
        image=find("<|image token|>", 151851),
        row_end=find("<|extra_200|>", 151846),
        frame_end=find("<|extra_201|>", 151847),
        codes=codes,
    )


def matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") == "emu3"


def image_arch(config: Mapping[str, Any]) -> VideoVQArch:
    known = {**IMAGE_DEFAULTS, **(config.get("vq_config") or {})}
    return VideoVQArch(
        widths=tuple(known["base_channels"] * factor for factor in known["channel_multiplier"]),
        blocks=known["num_res_blocks"],
        latent=known["latent_channels"],
        codes=known["codebook_size"],
        code_dim=known["embed_dim"],
        attention=tuple(known["attn_resolutions"] or ()),
        frames=known["temporal_downsample_factor"],
    )


def sizes(area: int, side: int) -> tuple[ImageSize, ...]:
    """Pictures of about `area` pixels in each ratio, in whole codes of `side` pixels."""
    found = []
    for width, height in RATIOS:
        unit = (area / (width * height)) ** 0.5 / side
        found.append(ImageSize(round(height * unit) * side, round(width * unit) * side))
    return tuple(dict.fromkeys(found))


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    config = checkpoint.config
    arch = decoder_arch(config.get("text_config") or {}, DEFAULTS, checkpoint.name)
    images = image_arch(config)
    ids = tokens(config, images.codes)
    side = images.downsample
    return ModelSpec(
        arch=replace(arch, outputs=ids.codes),
        defaults=SamplingDefaults(guidance=3.0, top_k=2048),
        sizes=sizes(int(config.get("image_area", AREA)), side),
        make_layout=lambda size: Layout(
            size.height // side, size.width // side, ids.codes, row_end=ids.row_end,
            epilogue=(ids.frame_end, ids.image_end, ids.end),
        ),
    )  # fmt: skip


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, shapes = read_spec(checkpoint), checkpoint.shapes()
    encode = text_encoder(checkpoint.file("tokenizer.json"))
    version = next((v for v in VERSIONS if f"{v.decoder}norm.weight" in shapes), VERSIONS[0])
    net = allocate(lambda: Transformer(spec.arch), placement)
    arch = image_arch(checkpoint.config)
    images = allocate(lambda: VideoVQ(arch), Placement(placement.device, torch.float32))
    slots = {
        **decoder_destinations(net, HF_DECODER, version.decoder),
        **decoder_destinations(net, [HEAD], version.head),
    }
    own = {name: slot for name, slot in module_destinations(images, version.images).items() if slot.into.ndim}
    copy_weights(checkpoint, {**slots, **own}, [ROTARY, r".*\.num_batches_tracked$"])
    ids = tokens(checkpoint.config, arch.codes)
    positions = int({**DEFAULTS, **(checkpoint.config.get("text_config") or {})}["max_position_embeddings"])

    def row(text: str, size: ImageSize) -> tuple[int, ...]:
        grid = f"{size.height // arch.downsample}*{size.width // arch.downsample}"
        return (ids.start, *encode(text), ids.image_start, *encode(grid), ids.image)

    def prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        return Prompt(row(text, size), row(NEGATIVE if negative is None else negative, size))

    return spec.build(FAMILY.name, checkpoint, DecoderTarget(net, positions=positions), images, prompt)


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
