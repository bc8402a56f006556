"""What Anole and Lumina-mGPT share: Chameleon's decoder, its vocabulary and its image tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError
from underdraw.models.checkpoint import FILES, Checkpoint
from underdraw.models.family import ModelSpec, Placement
from underdraw.models.transformers_layout import ROTARY, Encode, decoder_arch, text_encoder
from underdraw.models.vqgan_checkpoint import CHAMELEON, load_vqgan, vqgan_destinations
from underdraw.models.weight_map import HF_DECODER, HF_QK_NORM, WeightRule, allocate, copy_weights, decoder_destinations
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.tokenizers.vqgan import VQGAN

# The tokenizer's own ids; a configuration's bos_token_id is wrong.
START, PAD = 0, 1
CODES = range(4, 8196)  # image code c is token c + 4
IMAGE_END, IMAGE_START = 8196, 8197
SEPARATOR = 8710  # <reserved08706>, the end of a turn

DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 65536,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
DECODER = (*HF_DECODER, *HF_QK_NORM)
HEAD = WeightRule("lm_head.weight", "head.weight", cut="outputs")
IMAGES = "model.vqmodel."
PUBLISHED_IMAGES = "leloy/Anole-7b-v0.1-vqvae-hf"
_TOKENIZER = ("", "tokenizer/", "chameleon/tokenizer/", "ckpts/chameleon/tokenizer/")


def is_chameleon(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in ("chameleon", "chameleon_xllmx")


def chameleon_arch(checkpoint: Checkpoint) -> Arch:
    """The decoder; its query and key norms have one row for all heads or one for each, as the file has it."""
    arch = decoder_arch(checkpoint.config, DEFAULTS, checkpoint.name)
    rows = checkpoint.shapes().get("model.layers.0.self_attn.q_norm.weight", (1,))[0]
    return replace(
        arch,
        qk_norm="layer",
        qk_norm_heads="shared" if rows == 1 else "per_head",
        norm="post" if checkpoint.config.get("swin_norm") else "pre",
        outputs=CODES,
    )


def positions(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.get("max_position_embeddings", DEFAULTS["max_position_embeddings"]))


def load_chameleon(checkpoint: Checkpoint, spec: ModelSpec, placement: Placement) -> tuple[DecoderTarget, VQGAN]:
    """Decoder and image tokenizer, the latter from the same files where they hold its decoder."""
    net = allocate(lambda: Transformer(spec.arch), placement)
    slots = {**decoder_destinations(net, DECODER, "model."), **decoder_destinations(net, [HEAD])}
    shapes = checkpoint.shapes()
    if f"{IMAGES}decoder.conv_in.weight" in shapes:
        images, own = vqgan_destinations(shapes, CHAMELEON, placement, IMAGES)
        copy_weights(checkpoint, {**slots, **own}, [ROTARY, IMAGES])
    else:
        images = load_images(checkpoint, placement)
        copy_weights(checkpoint, slots, [ROTARY, IMAGES])
    return DecoderTarget(net, positions=positions(checkpoint)), images


def load_images(checkpoint: Checkpoint, placement: Placement) -> VQGAN:
    """Meta's vqgan.ckpt, or the same weights as the hub has them."""
    path = checkpoint.fetched([f"{folder}vqgan.ckpt" for folder in _TOKENIZER], PUBLISHED_IMAGES)
    return load_vqgan(path, CHAMELEON, placement, ignored=["loss"])


def load_text(checkpoint: Checkpoint) -> Encode:
    """Meta's text_tokenizer.json or transformers' version of it."""
    names = ["tokenizer.json", *(f"{folder}text_tokenizer.json" for folder in _TOKENIZER)]
    path: Path | None = checkpoint.companion(names)
    if path is None:
        raise CheckpointError(
            f"{checkpoint.name} has no text tokenizer; put its tokenizer.json or Meta's text_tokenizer.json into "
            f"{checkpoint.folder}, or name the folder that holds it in the environment variable {FILES}."
        )
    return text_encoder(path)
