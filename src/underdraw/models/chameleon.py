"""What Anole and Lumina-mGPT share: Chameleon's decoder, vocabulary, text tokenizer and image tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from underdraw.errors import CheckpointError
from underdraw.models import weight_map
from underdraw.models.checkpoint import COMPANION_FOLDERS, Checkpoint
from underdraw.models.config import Placement
from underdraw.models.family import ModelSpec
from underdraw.models.text_tokenizers import Encode, load_text_tokenizer
from underdraw.models.transformers_layout import decoder_arch
from underdraw.models.vqgan_checkpoint import CHAMELEON, allocate_vqgan, load_vqgan
from underdraw.models.weight_map import HF_DECODER, HF_HEAD, HF_QK_NORM, Destinations
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch
from underdraw.tokenizers.vqgan import VQGAN

# Ids of the tokenizer; the bos_token_id in published configurations is wrong.
START = 0
CODES = range(4, 8196)  # image code c is token c + 4
IMAGE_END, IMAGE_START = 8196, 8197
SEPARATOR = 8710  # <reserved08706>, the end of a turn
DOWNSAMPLE = 16  # pixels per code

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 65536,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
DECODER_RULES = (*HF_DECODER, *HF_QK_NORM)
IMAGE_TOKENIZER_PREFIX = "model.vqmodel."
IMAGE_TOKENIZER_HUB_ID = "leloy/Anole-7b-v0.1-vqvae-hf"
_COMPANION_FOLDERS = ("", "tokenizer/", "chameleon/tokenizer/", "ckpts/chameleon/tokenizer/")


def has_chameleon_decoder(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in ("chameleon", "chameleon_xllmx")


def is_chameleon(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has Chameleon's decoder and its vocabulary; Lumina-mGPT 2.0 has another."""
    return has_chameleon_decoder(config) and int(config.get("vocab_size") or DEFAULTS["vocab_size"]) < 2**17


def chameleon_arch(checkpoint: Checkpoint) -> Arch:
    arch = decoder_arch(checkpoint.config, DEFAULTS, checkpoint.name)
    # Anole's query and key norms have weights for every head, Lumina's share one row.
    norm_rows = checkpoint.shapes().get("model.layers.0.self_attn.q_norm.weight", (1,))[0]
    return replace(
        arch,
        qk_norm="layer",
        qk_norm_heads="shared" if norm_rows == 1 else "per_head",
        norm="post" if checkpoint.config.get("swin_norm") else "pre",
        outputs=CODES,
    )


def load_chameleon(checkpoint: Checkpoint, spec: ModelSpec, placement: Placement) -> tuple[DecoderTarget, VQGAN]:
    """Load the decoder and the image tokenizer, the latter from a companion file if the checkpoint lacks it."""
    shapes = checkpoint.shapes()
    if f"{IMAGE_TOKENIZER_PREFIX}decoder.conv_in.weight" in shapes:
        images, destinations = allocate_vqgan(shapes, CHAMELEON, placement, IMAGE_TOKENIZER_PREFIX)
        return load_decoder(checkpoint, spec, placement, destinations), images
    names = [f"{folder}vqgan.ckpt" for folder in _COMPANION_FOLDERS]
    path = checkpoint.find_or_download(names, IMAGE_TOKENIZER_HUB_ID)
    images = load_vqgan(path, CHAMELEON, placement, ignored=["loss"])
    return load_decoder(checkpoint, spec, placement), images


def load_decoder(
    checkpoint: Checkpoint, spec: ModelSpec, placement: Placement, images: Destinations | None = None
) -> DecoderTarget:
    """Load the decoder, and the image tokenizer of the same files if its destinations are given."""
    rules, ignored = {"model.": DECODER_RULES, "": [HF_HEAD]}, [IMAGE_TOKENIZER_PREFIX]
    return weight_map.load_decoder(checkpoint, spec, placement, rules, others=images, ignored=ignored)


def load_chameleon_text(checkpoint: Checkpoint, hub_id: str | None = None) -> Encode:
    """Load the text tokenizer: transformers' tokenizer.json or Meta's text_tokenizer.json.

    `hub_id` is the file that is downloaded if the checkpoint has none of them.
    """
    names = ["tokenizer.json", *(f"{folder}text_tokenizer.json" for folder in _COMPANION_FOLDERS)]
    if hub_id is not None:
        return load_text_tokenizer(checkpoint.find_or_download(names, hub_id)).encode
    path = checkpoint.find_companion(checkpoint.declare_companion(names, None).candidates)
    if path is None:
        raise CheckpointError(
            f"{checkpoint.name} has no text tokenizer; put its tokenizer.json or Meta's text_tokenizer.json into "
            f"{checkpoint.folder}, or list its folder in the environment variable {COMPANION_FOLDERS}."
        )
    return load_text_tokenizer(path).encode
