"""Lumina-mGPT 2.0: the first version's decoder and layout, a Qwen2 text tokenizer, and codes of 8x8 pixels (MoVQGAN).

An image of 768x768 pixels is 96 rows of 96 codes and a row end, more than 9300 tokens with its header.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from underdraw.layout import Layout
from underdraw.models import chameleon
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, ModelSpec
from underdraw.models.lumina import PATCH, list_sizes, prompt_builder
from underdraw.models.text_tokenizers import SavedTokenizer, load_saved_tokenizer
from underdraw.models.vqgan_checkpoint import MOVQ, load_vqgan

VOCAB_SIZE = 171385
CODES = range(155000, 155000 + 16384)
DOWNSAMPLE = 8  # pixels per code
SIDE = 768  # pixels, of the square that the model was trained for
MAX_PATCHES = 48  # of a side, in an image of that area with the largest aspect ratio
SAMPLING = SamplingDefaults(guidance=4.0, top_k=4096)
IMAGE_TOKENIZER_HUB_ID = "ai-forever/MoVQGAN/movqgan_270M.ckpt"
_COMPANION_FOLDERS = ("", "movqgan/270M/", "lumina_mgpt/movqgan/270M/")


@dataclass(frozen=True, slots=True)
class Lumina2Tokens:
    """Ids of the special tokens, by default the published ones; `sides[n]` is a side of n patches."""

    image_start: int = 151665
    image_end: int = 151666
    row_end: int = 151670
    sides: tuple[int, ...] = tuple(range(151671, 151671 + MAX_PATCHES + 1))

    @classmethod
    def of(cls, tokenizer: SavedTokenizer) -> Lumina2Tokens:
        """The ids in a tokenizer; its names are those of the first version."""
        return cls(
            image_start=tokenizer.token_id("<racm3:break>"),
            image_end=tokenizer.token_id("<eoss>"),
            row_end=tokenizer.token_id("<reserved08799>"),
            sides=tuple(tokenizer.token_id(f"<reserved{8800 + count:05d}>") for count in range(MAX_PATCHES + 1)),
        )


def matches(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    return chameleon.has_chameleon_decoder(config) and not chameleon.is_chameleon(config)


def make_layout(size: ImageSize, tokens: Lumina2Tokens) -> Layout:
    sides = (tokens.sides[side // PATCH] for side in (size.height, size.width))
    return Layout(
        size.height // DOWNSAMPLE,
        size.width // DOWNSAMPLE,
        CODES,
        prologue=(tokens.image_start, *sides),
        row_end=tokens.row_end,
        epilogue=(tokens.image_end,),
    )


def load_text(checkpoint: Checkpoint) -> SavedTokenizer:
    return load_saved_tokenizer(checkpoint.folder, checkpoint.name)


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    tokens, side = Lumina2Tokens.of(load_text(checkpoint)), checkpoint.recorded_side(PATCH) or SIDE
    return ModelSpec(
        arch=replace(chameleon.chameleon_arch(checkpoint), outputs=CODES),
        defaults=SAMPLING,
        sizes=tuple(size for size in list_sizes(side) if max(size.height, size.width) <= MAX_PATCHES * PATCH),
        make_layout=lambda size: make_layout(size, tokens),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec, text = read_spec(checkpoint), load_text(checkpoint)
    start = text.token_id(text.start or "<|endoftext|>")
    make_prompt = prompt_builder(text.encode, start, text.token_id("<reserved08706>"))
    names = [f"{folder}movqgan_270M.ckpt" for folder in _COMPANION_FOLDERS]
    path = checkpoint.find_or_download(names, IMAGE_TOKENIZER_HUB_ID)
    images = load_vqgan(path, MOVQ, placement, ignored=["loss", r"quantize\.(?!embedding)", "model_ema"])
    target = chameleon.load_decoder(checkpoint, spec, placement)
    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


FAMILY = Family(
    name="lumina2",
    summary="Lumina-mGPT 2.0 7B: images of about 768 px squared in any shape up to 4:1, 96x96 codes",
    published=tuple(
        PublishedCheckpoint(
            f"Alpha-VLLM/Lumina-mGPT-2.0{suffix}", "apache-2.0", "needs MoVQGAN, which is downloaded separately"
        )
        for suffix in ("", "-Omni")
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=load_text,
)
