"""Lumina-mGPT: Chameleon with pictures of any shape. A size header, rows that end with a token, then the end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from underdraw.layout import Layout
from underdraw.models.chameleon import (
    CODES,
    IMAGE_END,
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
    SamplingDefaults,
)
from underdraw.protocols import Prompt

ROW_END = 8803  # <reserved08799>
SIDE = 8804  # <reserved08800>, a side of 0; the token of a side of n patches is SIDE + n
PATCH, CELL = 32, 16  # pixels of a patch, which sides are counted in, and of a code
ASPECT = 4  # the longest side over the shortest, at most


def is_lumina(config: Mapping[str, Any]) -> bool:
    """Whether a Chameleon configuration has what Lumina's training added to it."""
    named = " ".join(config.get("architectures") or ())
    return is_chameleon(config) and ("mask_image_logits" in config or "XLLMX" in named or "dropout" in config)


def matches(checkpoint: Checkpoint) -> bool:
    return is_lumina(checkpoint.config)


def target_size(checkpoint: Checkpoint) -> int:
    """The side of a square picture, which the published names carry: 512, 768 or 1024."""
    for name in (checkpoint.name, str(checkpoint.config.get("_name_or_path", ""))):
        found = re.findall(r"(?<=-)\d{3,4}(?=$|[-/])", name)
        if found and int(found[-1]) % PATCH == 0:
            return int(found[-1])
    return 768


def sizes(target: int) -> tuple[ImageSize, ...]:
    """The square, then every shape of about its area: for each width the heights around the largest that still fits."""
    area = (target // PATCH) ** 2
    found = [
        ImageSize(height * PATCH, width * PATCH)
        for width in range(1, area + 1)
        for height in range(max(1, area // (width + 1)), area // width + 1)
        if max(height, width) <= ASPECT * min(height, width)
    ]
    square = ImageSize(target, target)
    return (square, *(size for size in found if size != square))


def layout(size: ImageSize) -> Layout:
    return Layout(
        size.height // CELL,
        size.width // CELL,
        CODES,
        prologue=(IMAGE_START, SIDE + size.height // PATCH, SIDE + size.width // PATCH),
        row_end=ROW_END,
        epilogue=(IMAGE_END, SEPARATOR),
    )


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    return ModelSpec(
        arch=chameleon_arch(checkpoint),
        defaults=SamplingDefaults(guidance=3.0, top_k=2000),
        sizes=sizes(target_size(checkpoint)),
        make_layout=layout,
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec = read_spec(checkpoint)
    encode = load_text(checkpoint)
    target, images = load_chameleon(checkpoint, spec, placement)

    def row(text: str, size: ImageSize) -> tuple[int, ...]:
        order = f"Generate an image of {size.width}x{size.height} according to the following prompt:\n{text}"
        return (START, *encode(order), SEPARATOR)

    def prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        # Without words the unconditional row starts at the image itself, which the layout's prologue opens.
        return Prompt(row(text, size), () if negative is None else row(negative, size))

    return spec.build(FAMILY.name, checkpoint, target, images, prompt)


FAMILY = Family(
    name="lumina",
    summary="Lumina-mGPT 7B: pictures of about 512, 768 or 1024 px squared in any shape up to 4:1",
    published=tuple(
        PublishedCheckpoint(
            f"Alpha-VLLM/Lumina-mGPT-7B-{size}",
            "see its page on the hub",
            "image tokenizer of Chameleon, fetched apart",
        )
        for size in (768, 512, 1024)
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
)
