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
    Description,
    Family,
    ImageSize,
    LoadedModel,
    Placement,
    PublishedCheckpoint,
    PublishedHead,
    SamplingDefaults,
)
from underdraw.models.lumina import is_lumina
from underdraw.protocols import Prompt

DOWNSAMPLE = 16


def recognise(checkpoint: Checkpoint) -> bool:
    return is_chameleon(checkpoint.config) and not is_lumina(checkpoint.config)


def describe(checkpoint: Checkpoint) -> Description:
    side = int((checkpoint.config.get("vq_config") or {}).get("resolution", 512))
    return Description(
        arch=chameleon_arch(checkpoint),
        settings=SamplingDefaults(guidance=3.0, top_k=2000),
        sizes=(ImageSize(side, side),),
        layout=lambda size: Layout(size.height // DOWNSAMPLE, size.width // DOWNSAMPLE, CODES),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    known = describe(checkpoint)
    encode = load_text(checkpoint)
    target, images = load_chameleon(checkpoint, known, placement)

    def row(text: str) -> tuple[int, ...]:
        return (START, *encode(text), SEPARATOR, IMAGE_START)

    def prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        return Prompt(row(text), (START, IMAGE_START) if negative is None else row(negative))

    return known.model(FAMILY.name, checkpoint, target, images, prompt)


FAMILY = Family(
    name="anole",
    summary="Anole 7B in the layout of transformers' Chameleon: 512 px, 32x32 codes",
    published=(PublishedCheckpoint("leloy/Anole-7b-v0.1-hf", "apache-2.0", "with an image tokenizer of its own"),),
    recognise=recognise,
    load=load,
    describe=describe,
    drafters=(PublishedHead("jadohu/anole_drafter", 4096, 512),),
)
