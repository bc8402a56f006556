"""Anole: Chameleon fine-tuned to generate images of 512x512 pixels, 32x32 codes without row-end tokens."""

from __future__ import annotations

from underdraw.layout import Layout
from underdraw.models import chameleon
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, PublishedDrafter, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, ModelSpec
from underdraw.models.lumina import is_lumina
from underdraw.models.transformers_layout import max_positions
from underdraw.protocols import Prompt


def matches(checkpoint: Checkpoint) -> bool:
    return chameleon.is_chameleon(checkpoint.config) and not is_lumina(checkpoint.config)


def make_layout(size: ImageSize) -> Layout:
    return Layout(size.height // chameleon.DOWNSAMPLE, size.width // chameleon.DOWNSAMPLE, chameleon.CODES)


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    side = int((checkpoint.config.get("vq_config") or {}).get("resolution", 512))
    return ModelSpec(
        arch=chameleon.chameleon_arch(checkpoint),
        defaults=SamplingDefaults(guidance=3.0, temperature=0.7, top_p=0.9),
        sizes=(ImageSize(side, side),),
        make_layout=make_layout,
        max_positions=max_positions(checkpoint.config, chameleon.DEFAULTS),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec = read_spec(checkpoint)
    encode = chameleon.load_chameleon_text(checkpoint)
    target, images = chameleon.load_chameleon(checkpoint, spec, placement)

    def encode_prompt(text: str) -> tuple[int, ...]:
        return (chameleon.START, *encode(text), chameleon.SEPARATOR, chameleon.IMAGE_START)

    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        no_text = (chameleon.START, chameleon.IMAGE_START)
        return Prompt(encode_prompt(text), no_text if negative is None else encode_prompt(negative))

    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


FAMILY = Family(
    name="anole",
    summary="Anole 7B in the layout of transformers' Chameleon: 512 px, 32x32 codes",
    published=(PublishedCheckpoint("leloy/Anole-7b-v0.1-hf", "apache-2.0", "includes its image tokenizer"),),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=chameleon.load_chameleon_text,
    drafters=(PublishedDrafter("jadohu/anole_drafter", hidden_size=4096, image_side=512),),
)
