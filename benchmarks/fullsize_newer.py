"""Checkpoints of GLM-Image, Lumina-mGPT 2.0 and SimpleAR for benchmarks/fullsize.py, in their authors' layouts."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from fullsize_checkpoints import (
    Shapes,
    Sizes,
    random_tensors,
    shapes_of,
    write_chameleon,
    write_shards,
    write_tokenizer,
)
from glm_image_pixels import write_glm_image_pixels
from torch import nn

from underdraw.models import glm_image, lumina2, simplear
from underdraw.models.vqgan_checkpoint import MOVQ, vqgan_destinations
from underdraw.models.weight_map import HF_DECODER, HF_QKV_BIAS, decoder_destinations
from underdraw.tokenizers.cosmos import CosmosArch, CosmosTokenizer
from underdraw.tokenizers.vqgan import VQGAN, VQArch

PUBLISHED = {
    "simplear": Sizes(896, 24, 14, 4864, 215672, 1024, kv_heads=2, codes=simplear.CODES, images=(256, 512, 512)),
    "glm_image": Sizes(4096, 40, 32, 13696, 168064, 1024, kv_heads=2),
    "lumina2": Sizes(4096, 32, 32, 11008, lumina2.VOCAB_SIZE, 768, images=(256, 512, 512, 1024)),
}
TINY = {
    "simplear": Sizes(32, 2, 4, 48, 64512, 64, kv_heads=2, codes=simplear.CODES, images=(8, 16, 16)),
    "glm_image": Sizes(64, 2, 4, 96, 320, 64, kv_heads=2, codes=64),
    "lumina2": Sizes(32, 2, 4, 48, lumina2.VOCAB_SIZE, 64, images=(32, 32, 32, 64)),
}
SIMPLEAR_SPECIALS = ("<|t2i|>", "<|i2t|>", "<|soi|>", "<|vtokens|>", "<|t2v|>", "<|v2t|>", "<|sov|>")
LUMINA2_SPECIALS = (
    "<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>",
    *(f"<reserved{8800 + count:05d}>" for count in range(lumina2.MAX_PATCHES + 1)),
)  # fmt: skip
PAIRED = re.compile(r"(.*(?:block.*\.conv[12]|conv_in|conv_out))\.(weight|bias)")  # Cosmos: over space, then over time


def write_qwen_tokenizer(folder: Path, specials: Sequence[str]) -> None:
    """Write a slow Qwen2 tokenizer that has no merges, as both authors publish theirs: bytes, then special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = ["<|endoftext|>", *specials]
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    ids = {name: len(letters) + index for index, name in enumerate(names)}
    added = {str(index): {"content": name, "special": True} for name, index in ids.items()}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": names[0],
        "pad_token": names[0], "additional_special_tokens": names[1:], "unk_token": None,
    }  # fmt: skip
    for file, content in (("vocab", letters), ("added_tokens", ids), ("tokenizer_config", settings)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def write_lumina2(folder: Path, sizes: Sizes) -> None:
    """The decoder of the first version with a larger vocabulary, and MoVQGAN as a bare state dict."""
    write_chameleon(
        folder, sizes, {"architectures": ["ChameleonXLLMXForConditionalGeneration"]}, "shared", images=False
    )
    (folder / "underdraw.json").write_text(json.dumps({"size": f"{sizes.side}x{sizes.side}"}))
    write_qwen_tokenizer(folder, LUMINA2_SPECIALS)
    last = len(sizes.images) - 1
    arch = VQArch(sizes.images, codes=sizes.codes, code_dim=4, latent=4, attention=(last,), spatial_norm=True)
    with torch.device("meta"):
        images = VQGAN(arch)
    shapes = shapes_of(vqgan_destinations(images, {}, MOVQ))
    torch.save(dict(random_tensors(shapes, torch.float32)), folder / "movqgan_270M.ckpt")


def write_glm_image(folder: Path, sizes: Sizes) -> None:
    """The decoder in its folder of the diffusers pipeline; the other parts are small ones, whatever the size."""
    net = sizes.net(qkv_bias=True, norm="sandwich", outputs=range(sizes.codes))
    shapes = shapes_of(decoder_destinations(net, {"model.language_model.": glm_image.DECODER_RULES}))
    first_word = sizes.codes + 8 if sizes.codes < glm_image.CODES else 16512
    shapes["lm_head.weight"] = (first_word, sizes.dim)
    shapes["model.vqmodel.quantize.embedding.weight"] = (sizes.codes, sizes.dim // 2)
    decoder, processor = folder / glm_image.DECODER_FOLDER, folder / glm_image.TEXT_FOLDER
    write_glm_image_pixels(folder, sizes.codes)
    decoder.mkdir()
    processor.mkdir()
    write_shards(decoder, shapes)
    width = sizes.dim // sizes.heads
    sections = [width // 16, 3 * width // 32]
    sections.append(width // 4 - sum(sections))  # half of a head is rotated, in pairs
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": sections}
    config = {
        "model_type": "glm_image", "text_config": {**sizes.config, "rope_parameters": rope},
        "vq_config": {"num_embeddings": sizes.codes}, "image_start_token_id": sizes.codes,
        "image_end_token_id": sizes.codes + 1,
    }  # fmt: skip
    (decoder / "config.json").write_text(json.dumps(config))
    write_tokenizer(processor / "tokenizer.json", first_word, ["<sop>", "<eop>"])


def write_simplear(folder: Path, sizes: Sizes) -> None:
    """A Qwen2 with tied embeddings, and Cosmos's video decoder as TorchScript."""
    net = sizes.net(qkv_bias=True)
    shapes = shapes_of(decoder_destinations(net, {"model.": (*HF_DECODER, *HF_QKV_BIAS)}))
    write_shards(folder, shapes)
    config = {
        "model_type": "qwen2", "architectures": ["SimpARForCausalLM"], **sizes.config, "tie_word_embeddings": True,
        "rope_theta": 1e6, "image_sides": [sizes.side],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    write_qwen_tokenizer(folder, SIMPLEAR_SPECIALS)
    with torch.device("meta"):
        images = CosmosTokenizer(CosmosArch(sizes.images))
    state = dict(video_shapes({name: tuple(value.shape) for name, value in images.state_dict().items()}))
    module = nn.Module()
    for name, value in random_tensors(state, torch.float32):
        add_parameter(module, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is what the authors publish
        torch.jit.script(module).save(str(folder / "decoder.jit"))


def video_shapes(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the published video decoder, whose single-frame form has `shapes`."""
    for name, shape in shapes.items():
        if pair := PAIRED.fullmatch(name):
            width = shape[0]
            over_space, over_time = f"{pair[1]}.0.conv3d.{pair[2]}", f"{pair[1]}.1.conv3d.{pair[2]}"
            yield over_space, (*shape[:2], 1, *shape[2:]) if pair[2] == "weight" else shape
            yield over_time, (width, width, 3, 1, 1) if pair[2] == "weight" else shape
            continue
        module, _, kind = name.rpartition(".")
        if "norm" in module.rpartition(".")[2]:
            yield f"{module}.norm.{kind}", shape
            continue
        frames = 3 if module.endswith("upsample.conv1") else 1
        video = (*shape[:2], frames, *shape[2:]) if kind == "weight" else shape
        yield f"{module}.conv3d.{kind}", video
        if ".attn_1.1.v" in module:  # over time, where one frame needs no queries and keys
            yield from ((f"{module[:-1]}{part}.conv3d.{kind}", video) for part in "qk")


def add_parameter(module: nn.Module, name: str, value: Any) -> None:
    """Add a tensor under its full name to a tree of modules."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    module.register_parameter(last, nn.Parameter(value, requires_grad=False))


WRITERS = {"simplear": write_simplear, "glm_image": write_glm_image, "lumina2": write_lumina2}
