"""Anole: Chameleon that draws. 512x512 pixels, 32x32 codes without row ends, text and image in one vocabulary."""

from __future__ import annotations

from underdraw.layout import Layout
from underdraw.models.chameleon import (
    CODES,
    IMAGE_START,
    SEPARATOR,
    START,
    chameleon_arch,
    is_chameleon,
    load_chameleon,
    load_text,
)
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import (
    Family,
    ImageSize,
    LoadedModel,
    ModelSpec,
    Placement,
    PublishedCheckpoint,
    PublishedDrafter,
    SamplingDefaults,
)
from underdraw.models.lumina import is_lumina
from underdraw.protocols import Prompt

DOWNSAMPLE = 16


def matches(checkpoint: Checkpoint) -> bool:
    return is_chameleon(checkpoint.config) and not is_lumina(checkpoint.config)


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    side = int((checkpoint.config.get("vq_config") or {}).get("resolution", 512))
    return ModelSpec(
        arch=chameleon_arch(checkpoint),
        defaults=SamplingDefaults(guidance=3.0, top_k=2000),
        sizes=(ImageSize(side, side),),
        make_layout=lambda size: Layout(size.height // DOWNSAMPLE, size.width // DOWNSAMPLE, CODES),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec = read_spec(checkpoint)
    encode = load_text(checkpoint)
    target, images = load_chameleon(checkpoint, spec, placement)

    def row(text: str) -> tuple[int, ...]:
        return (START, *encode(text), SEPARATOR, IMAGE_START)

    def prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        return Prompt(row(text), (START, IMAGE_START) if negative is None else row(negative))

    return spec.build(FAMILY.name, checkpoint, target, images, prompt)


FAMILY = Family(
    name="anole",
    summary="Anole 7B in the layout of transformers' Chameleon: 512 px, 32x32 codes",
    published=(PublishedCheckpoint("leloy/Anole-7b-v0.1-hf", "apache-2.0", "with an image tokenizer of its own"),),
    matches=matches,
    load=load,
    read_spec=read_spec,
    drafters=(PublishedDrafter("jadohu/anole_drafter", 4096, 512),),
)
