"""Write small checkpoints of GLM-Image, SimpleAR and Lumina-mGPT 2.0 with random weights in their published layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_writers import (
    CHAMELEON,
    State,
    chameleon_shapes,
    random_state,
    randomise,
    write_shards,
    write_text_tokenizer,
)
from vqgan_shapes import movqgan_shapes

# GLM-Image: transformers and diffusers write it

GLM_SPECIALS = {"<sop>": 73, "<eop>": 74, "<|image|>": 75, "<|endoftext|>": 76, "<|dit_token_64|>": 64}


def write_glm_image(folder: Path) -> Any:
    """zai-org/GLM-Image without the parts for pixels: 64 codes, start 64, end 65; small grids of about 256 cells."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    config = GlmImageConfig(
        text_config={
            "vocab_size": 260, "vision_vocab_size": 72, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 65,
            "pad_token_id": 76, "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
            },
        },
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "image_size": 64, "patch_size": 8},
        vq_config={"num_embeddings": 64, "embed_dim": 16, "latent_channels": 32},
        image_token_id=75, image_start_token_id=64, image_end_token_id=65,
    )  # fmt: skip
    model = GlmImageForConditionalGeneration(config).eval()
    randomise(model, 8)
    model.save_pretrained(folder / "vision_language_encoder", max_shard_size="100KB")
    (folder / "processor").mkdir()
    write_text_tokenizer(folder / "processor" / "tokenizer.json", 80, GLM_SPECIALS)
    settings = {"bos_token": "<|dit_token_64|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    (folder / "processor" / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    (folder / "processor" / "chat_template.jinja").write_text(template)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "GlmImagePipeline"}))
    return model


# SimpleAR: a Qwen2 that transformers writes, a slow tokenizer, and Cosmos's decoder as TorchScript

SIMPLEAR_SPECIALS = ("<|t2i|>", "<|i2t|>", "<|soi|>", "<|vtokens|>", "<|t2v|>", "<|v2t|>", "<|sov|>")


def write_simplear(folder: Path, *, tied: bool = True, decoder: bool = True) -> Any:
    """Daniel0724/SimpleAR-*, 4x4 codes of 16x16 pixels; with `decoder` Cosmos's is where its repository puts it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    text = write_qwen_tokenizer(folder)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=text + 64000, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    randomise(model, 10)
    model.tie_weights()
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    changes = {"architectures": ["SimpARForCausalLM"], "image_sides": [64, 32]}
    (folder / "config.json").write_text(json.dumps({**written, **changes}))
    if decoder:
        write_cosmos(folder.parent / "Cosmos-1.0-Tokenizer-DV8x16x16" / "decoder.jit")
    return model


def write_qwen_tokenizer(folder: Path, specials: Sequence[str] = SIMPLEAR_SPECIALS) -> int:
    """A byte-level BPE without merges in the files of a slow tokenizer; returns its number of tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    names = ("<|endoftext|>", *specials)
    (folder / "added_tokens.json").write_text(json.dumps({name: len(vocab) + i for i, name in enumerate(names)}))
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {str(len(vocab) + i): {"content": name, "special": True, **flags} for i, name in enumerate(names)}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>", "additional_special_tokens": list(specials), "unk_token": None,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab) + len(names)


def small_cosmos() -> Any:
    """A small decoder of Cosmos's discrete video tokenizer."""
    from cosmos_reference import CosmosVideoDecoder

    network = CosmosVideoDecoder(width=8, mults=(1, 2, 2), latent=4).eval()
    randomise(network, 11)
    return network


def write_cosmos(path: Path) -> None:
    """`small_cosmos` as the TorchScript file that NVIDIA publishes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.trace(small_cosmos(), torch.zeros(1, 1, 2, 2, dtype=torch.int64)).save(str(path))


# Lumina-mGPT 2.0: Chameleon's decoder in the authors' layout, a Qwen2 tokenizer, and MoVQGAN as a bare state dict

LUMINA2 = {**CHAMELEON, "vocab_size": 171385, "max_position_embeddings": 10240}
LUMINA2_SPECIALS = (
    "<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>",
    *(f"<reserved{8800 + side:05d}>" for side in range(49)),
)  # fmt: skip


def write_lumina2(folder: Path, side: int = 64) -> tuple[State, State]:
    """Alpha-VLLM/Lumina-mGPT-2.0, its size recorded as in saved pipelines; returns the decoder and MoVQGAN."""
    folder.mkdir(parents=True, exist_ok=True)
    state = random_state(chameleon_shapes(LUMINA2, 1), 12)
    write_shards(folder, state, 2)
    config = {"model_type": "chameleon", "architectures": ["ChameleonXLLMXForConditionalGeneration"], **LUMINA2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "underdraw.json").write_text(json.dumps({"size": f"{side}x{side}"}))
    write_qwen_tokenizer(folder, LUMINA2_SPECIALS)
    images = random_state(movqgan_shapes((32, 32, 32, 64), 16384, 4), 13)
    path = folder.parent / "movqgan" / "270M" / "movqgan_270M.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**images, "loss.logvar": torch.zeros(())}, path)
    return state, images
