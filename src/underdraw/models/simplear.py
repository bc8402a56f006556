"""SimpleAR: a Qwen2 decoder whose vocabulary is extended by the 64000 codes of Cosmos's tokenizer; up to 1024 px.

The negative prompt is a separate sequence, with its own length and positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.io import read_text
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize, Placement, PublishedCheckpoint, SamplingDefaults
from underdraw.models.family import Family, LoadedModel, ModelSpec
from underdraw.models.text_tokenizers import SavedTokenizer, load_saved_tokenizer
from underdraw.models.transformers_layout import decoder_arch, max_positions, with_defaults
from underdraw.models.weight_map import HF_DECODER, HF_HEAD, HF_QKV_BIAS, load_decoder
from underdraw.nn.transformer import Arch
from underdraw.protocols import Prompt
from underdraw.tokenizers.cosmos import load_cosmos

DEFAULTS: Mapping[str, Any] = {  # of the 0.5B model
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 215672,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
SHAPE_1_5B: Mapping[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
CODES = 64000
DOWNSAMPLE = 16  # pixels per code
SIDES = (1024, 768, 512, 256)  # pixels
SAMPLING = SamplingDefaults(guidance=6.0)
TEXT_TO_IMAGE, IMAGE_START = "<|t2i|>", "<|soi|>"
PROMPT_PREFIX = "A highly realistic image of "
NEGATIVE_PROMPT = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion"
)
IMAGE_TOKENIZER = "Cosmos-1.0-Tokenizer-DV8x16x16"
_TOKENIZER_FILES = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")


def matches(checkpoint: Checkpoint) -> bool:
    """A Qwen2 by its class's name, or by the special tokens that SimpleAR adds."""
    config = checkpoint.config
    if config.get("model_type") != "qwen2":
        return False
    if any("SimpAR" in name for name in config.get("architectures") or ()):
        return True
    files = [checkpoint.folder / name for name in _TOKENIZER_FILES]
    return any(TEXT_TO_IMAGE in read_text(file, "a tokenizer", CheckpointError) for file in files if file.exists())


def simplear_arch(config: Mapping[str, Any], codes: range, name: str) -> Arch:
    """The decoder of a Qwen2 configuration, its head cut to the codes."""
    if config.get("use_sliding_window"):
        raise UnsupportedError(f"{name} has a sliding window, which no published model of its family has.")
    return replace(decoder_arch(config, DEFAULTS, name), qkv_bias=True, outputs=codes)


def make_layout(size: ImageSize, codes: range) -> Layout:
    return Layout(size.height // DOWNSAMPLE, size.width // DOWNSAMPLE, codes)


def load_text(checkpoint: Checkpoint) -> SavedTokenizer:
    """The text tokenizer; an error if it lacks the special tokens of the prompts."""
    tokenizer = load_saved_tokenizer(checkpoint.folder, checkpoint.name)
    for token in (TEXT_TO_IMAGE, IMAGE_START):
        tokenizer.token_id(token)
    return tokenizer


def _codes(checkpoint: Checkpoint, text_tokens: int) -> range:
    """Token ids of the image codes, behind those of the text tokenizer."""
    codes = range(text_tokens, text_tokens + CODES)
    rows = int(with_defaults(checkpoint.config, DEFAULTS)["vocab_size"])
    if codes.stop > rows:
        raise CheckpointError(
            f"{checkpoint.name} has {rows} tokens, too few for {text_tokens} of text and {len(codes)} of images; "
            "its tokenizer belongs to another model."
        )
    return codes


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    codes = _codes(checkpoint, load_text(checkpoint).size)
    sides = tuple(int(side) for side in checkpoint.config.get("image_sides", SIDES))
    return ModelSpec(
        arch=simplear_arch(checkpoint.config, codes, checkpoint.name),
        defaults=SAMPLING,
        sizes=tuple(ImageSize(side, side) for side in sides),
        make_layout=lambda size: make_layout(size, codes),
        max_positions=max_positions(checkpoint.config, DEFAULTS),
    )


def load(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    spec = read_spec(checkpoint)
    encode = load_text(checkpoint).encode
    names = [f"{folder}{IMAGE_TOKENIZER}/decoder.jit" for folder in ("", "checkpoints/")]
    images = load_cosmos(
        checkpoint.find_or_download([*names, "decoder.jit"], f"nvidia/{IMAGE_TOKENIZER}/decoder.jit"), placement.device
    )
    is_tied = checkpoint.config.get("tie_word_embeddings") or "lm_head.weight" not in checkpoint.shapes()
    rules = {"model.": (*HF_DECODER, *HF_QKV_BIAS), "": () if is_tied else (HF_HEAD,)}
    target = load_decoder(checkpoint, spec, placement, rules, ignored=[r"lm_head\."] if is_tied else ())
    if is_tied:
        net, codes = target.net, spec.arch.outputs
        assert codes is not None
        net.head.weight.data.copy_(net.embedding.weight.data[codes.start : codes.stop])

    def encode_prompt(text: str) -> tuple[int, ...]:
        return tuple(encode(f"{TEXT_TO_IMAGE}{text}{IMAGE_START}"))

    def make_prompt(text: str, negative: str | None, _: ImageSize) -> Prompt:
        return Prompt(
            encode_prompt(PROMPT_PREFIX + text), encode_prompt(NEGATIVE_PROMPT if negative is None else negative)
        )

    return spec.build(FAMILY.name, checkpoint, target, images, make_prompt)


FAMILY = Family(
    name="simplear",
    summary="SimpleAR 0.5B and 1.5B: 1024 px, 64x64 codes, and 768, 512 or 256 px",
    published=tuple(
        PublishedCheckpoint(
            f"Daniel0724/SimpleAR-{size}-{stage}",
            "mit",
            "needs Cosmos's image tokenizer, which is downloaded separately under NVIDIA's licence",
        )
        for size in ("0.5B", "1.5B")
        for stage in ("RL", "SFT")
    ),
    matches=matches,
    load=load,
    read_spec=read_spec,
    load_text=load_text,
)
