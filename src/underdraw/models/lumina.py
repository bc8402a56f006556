"""Lumina-mGPT: Chameleon fine-tuned to generate images of many shapes: a size header, rows with end tokens, an end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from underdraw.layout import Layout
from underdraw.models import chameleon
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import UNKNOWN_LICENCE, ImageSize, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, MakePrompt, ModelSpec
from underdraw.models.text_tokenizers import Encode
from underdraw.protocols import Prompt

ROW_END = 8803  # <reserved08799>
SIDE_TOKEN = 8804  # <reserved08800>; a side of n patches is token SIDE_TOKEN + n
PATCH = 32  # pixels; image sides are multiples of it
MAX_ASPECT_RATIO = 4
SIDES = (768, 512, 1024)  # of the square images that the published models were trained for
TEXT_TOKENIZER = "Alpha-VLLM/Lumina-mGPT-7B-768/tokenizer.json"  # the 512 and 1024 px repositories have none
_PUBLISHED_NAME = r"Lumina-mGPT-\d+B-(\d{3,4})"


def is_lumina(config: Mapping[str, Any]) -> bool:
    """Whether a Chameleon configuration has a field that Lumina's training code adds."""
    architectures = " ".join(config.get("architectures") or ())
    added = "mask_image_logits" in config or "XLLMX" in architectures or "dropout" in config
    return chameleon.is_chameleon(config) and added


def matches(checkpoint: Checkpoint) -> bool:
    return is_lumina(checkpoint.config)


def trained_side(checkpoint: Checkpoint) -> int | None:
    """The side of the square image that the model was trained for, or None if it is not recorded.

    Saved pipelines record it, the configuration does not. Otherwise it is part of the repository's name: that of the
    user, of the folder, of its repository in the hub's cache, or of the configuration's `_name_or_path`, which comes
    last because it may name the model that this one was trained from.
    """
    if saved := checkpoint.recorded_side(PATCH):
        return saved
    path = checkpoint.path.resolve()
    repository = path.parents[1].name if path.parent.name == "snapshots" else ""
    names = (Path(checkpoint.name).name, path.name, repository, str(checkpoint.config.get("_name_or_path", "")))
    sides = [int(side) for name in names for side in re.findall(_PUBLISHED_NAME, name)]
    return next((side for side in sides if side in SIDES), None)


def list_sizes(side: int) -> tuple[ImageSize, ...]:
    """The square, then every shape of about its area: for each width the heights around the largest that fits."""
    area = (side // PATCH) ** 2
    sizes = [
        ImageSize(height * PATCH, width * PATCH)
        for width in range(1, area + 1)
        for height in range(max(1, area // (width + 1)), area // width + 1)
        if max(height, width) <= MAX_ASPECT_RATIO * min(height, width)
    ]
    square = ImageSize(side, side)
    return (square, *(size for size in sizes if size != square))


def make_layout(size: ImageSize) -> Layout:
    return Layout(
        size.height // chameleon.DOWNSAMPLE,
        size.width // chameleon.DOWNSAMPLE,
        chameleon.CODES,
        prologue=(chameleon.IMAGE_START, SIDE_TOKEN + size.height // PATCH, SIDE_TOKEN + size.width // PATCH),
        row_end=ROW_END,
        epilogue=(chameleon.IMAGE_END, chameleon.SEPARATOR),
    )


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    side = trained_side(checkpoint)
    return ModelSpec(
        arch=chameleon.chameleon_arch(checkpoint),
        defaults=SamplingDefaults(guidance=4.0, top_k=2000),
        sizes=tuple(dict.fromkeys(size for other in (side, *SIDES) if other for size in list_sizes(other))),
        make_layout=make_layout,
        requires_size=side is None,
        max_positions=None,  # 1024 x 1024 pixels need more than the configuration's, and RoPE goes on
    )


def load_text(checkpoint: Checkpoint) -> Encode:
    return chameleon.load_chameleon_text(checkpoint, TEXT_TOKENIZER)


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec = read_spec(checkpoint)
    encode = load_text(checkpoint)
    target, images = chameleon.load_chameleon(checkpoint, spec, placement)
    make_prompt = prompt_builder(encode, chameleon.START, chameleon.SEPARATOR)
    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


def prompt_builder(encode: Encode, start: int, separator: int) -> MakePrompt:
    """Prompts of the instruction that the models were trained with."""

    def encode_prompt(text: str, size: ImageSize) -> tuple[int, ...]:
        instruction = f"Generate an image of {size.width}x{size.height} according to the following prompt:\n{text}"
        return (start, *encode(instruction), separator)

    def make_prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        # Without a negative prompt the unconditional row is empty: it begins with the layout's size header.
        return Prompt(encode_prompt(text, size), () if negative is None else encode_prompt(negative, size))

    return make_prompt


FAMILY = Family(
    name="lumina",
    summary="Lumina-mGPT 7B: images of about 512, 768 or 1024 px squared in any shape up to 4:1",
    published=tuple(
        PublishedCheckpoint(
            f"Alpha-VLLM/Lumina-mGPT-7B-{side}",
            UNKNOWN_LICENCE,
            "needs Chameleon's image tokenizer, which is downloaded separately",
        )
        for side in (768, 512, 1024)
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=load_text,
)
