"""Checkpoints of published sizes and formats with random weights, for benchmarks/fullsize.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from underdraw.models import chameleon, emu3, janus, llamagen
from underdraw.models.vqgan_checkpoint import (
    CHAMELEON,
    JANUS,
    LLAMAGEN,
    MOVQ_TRANSFORMERS,
    VQGANFormat,
    vqgan_destinations,
)
from underdraw.models.weight_map import HF_DECODER, WeightDestination, decoder_destinations, module_destinations
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch, Transformer
from underdraw.tokenizers.movq import VideoVQ
from underdraw.tokenizers.vqgan import VQGAN, VQArch

Shapes = dict[str, tuple[int, ...]]
SHARD, CHUNK, WRITER_THREADS = 2 * 10**9, 2**26, 8  # bytes per file, bytes per write, files at a time
WORDS = ["a", "red", "fox", "on", "the", "blue", "ice"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder and its image tokenizer; `side` is the image's in pixels."""

    dim: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    side: int
    kv_heads: int | None = None
    codes: int = 16384
    images: tuple[int, ...] = (128, 128, 256, 256, 512)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.dim, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads, "intermediate_size": self.ffn,
            "vocab_size": self.vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 9216,
        }  # fmt: skip

    def net(self, **options: Any) -> Transformer:
        """The decoder on the meta device."""
        arch = Arch(
            self.dim, self.layers, self.heads, self.ffn, self.vocab, Rope.one_axis(self.dim // self.heads),
            kv_heads=self.kv_heads, **options,
        )  # fmt: skip
        with torch.device("meta"):
            return Transformer(arch)


PUBLISHED = {  # the fastest first
    "llamagen": Sizes(1280, 36, 20, 3584, 16384, 512),
    "janus": Sizes(4096, 30, 32, 11008, 102400, 384),
    "anole": Sizes(4096, 32, 32, 11008, 65536, 512, codes=8192),
    "lumina": Sizes(4096, 32, 32, 11008, 65536, 768, codes=8192),
    "emu3": Sizes(4096, 32, 32, 14336, 184622, 720, kv_heads=8, codes=32768, images=(256, 512, 512, 1024)),
}
SMALL = (32, 32, 32, 32, 64)
TINY = {
    "anole": Sizes(32, 2, 4, 48, 9216, 64, codes=8192, images=SMALL),
    "lumina": Sizes(32, 2, 4, 48, 9216, 128, codes=8192, images=SMALL),
    "llamagen": Sizes(64, 2, 1, 96, 64, 64, codes=64, images=SMALL),
    "janus": Sizes(32, 2, 4, 48, 320, 64, codes=64, images=SMALL),
    "emu3": Sizes(32, 2, 4, 48, 184622, 32, kv_heads=2, codes=32768, images=(32, 32, 32, 64)),
}


def shapes_of(destinations: Mapping[str, WeightDestination]) -> Shapes:
    return {name: tuple(to.memory.shape) for name, to in destinations.items() if to.memory.ndim}


def vqgan(sizes: Sizes, naming: VQGANFormat, code_dim: int, prefix: str = "") -> Shapes:
    attention = (len(sizes.images) - 1,) if naming.unit_codes else ()
    arch = VQArch(sizes.images, codes=sizes.codes, code_dim=code_dim, attention=attention)
    with torch.device("meta"):
        model = VQGAN(arch)
    levels = 0 if naming is CHAMELEON else len(sizes.images)
    return shapes_of(module_destinations(model, prefix, lambda name: naming.tensor_name(name, levels)))


def random_tensors(
    shapes: Shapes, dtype: torch.dtype, location: Literal["host", "device"] = "host"
) -> Iterator[tuple[str, Tensor]]:
    """Random weights at the scale of trained ones, generated on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(len(shapes))
    for name, shape in shapes.items():
        value = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        if len(shape) == 1 or "_norm." in name:
            value = value.mul_(0.1).add_(float(name.endswith("weight") or name.endswith("var")))
        elif "embed" not in name:
            value.mul_(1.2 * (shape[1] * torch.Size(shape[2:]).numel()) ** -0.5)
        yield name, value.cpu() if location == "host" else value


def write_shards(folder: Path, shapes: Shapes) -> None:
    """Write bfloat16 safetensors with an index, several files at a time."""
    parts: list[Shapes] = [{}]
    for name, shape in shapes.items():
        if parts[-1] and sum(2 * torch.Size(size).numel() for size in parts[-1].values()) > SHARD:
            parts.append({})
        parts[-1][name] = shape
    files = {f"model-{index + 1:05d}.safetensors": part for index, part in enumerate(parts)}
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        list(pool.map(lambda item: write_file(folder / item[0], item[1]), files.items()))
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_file(path: Path, shapes: Shapes) -> None:
    """Write one safetensors file: the length of its header, the header, and the data."""
    header, stop = {}, 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in random_tensors(shapes, torch.bfloat16, location="device"):
            for part in value.reshape(-1).view(torch.uint8).split(CHUNK):
                file.write(part.cpu().numpy().data)


def write_tokenizer(path: Path, first: int, specials: Sequence[str] = ()) -> None:
    """Write a tokenizer of a few words with ids from `first` on, then special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: first + index for index, word in enumerate([*WORDS, "<unk>", *specials])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(path))


def write_chameleon(folder: Path, sizes: Sizes, extra: dict[str, Any], rows: str, *, images: bool = True) -> None:
    """Write the decoder and, with `images`, the image tokenizer and the text tokenizer."""
    net = sizes.net(qk_norm="layer", qk_norm_heads=rows)
    shapes = shapes_of(decoder_destinations(net, {"model.": chameleon.DECODER_RULES}))
    shapes["lm_head.weight"] = (sizes.vocab, sizes.dim)
    if images and rows == "per_head":
        shapes |= vqgan(sizes, CHAMELEON, 256, "model.vqmodel.")
    elif images:
        state = dict(random_tensors(vqgan(sizes, CHAMELEON, 256), torch.float32))
        torch.save({"state_dict": state}, folder / "vqgan.ckpt")
    write_shards(folder, shapes)
    config = {"model_type": "chameleon", **sizes.config, "vq_config": {"resolution": sizes.side}, **extra}
    (folder / "config.json").write_text(json.dumps(config))
    if images:
        write_tokenizer(folder / "tokenizer.json", 8900)


def write_lumina(folder: Path, sizes: Sizes) -> None:
    write_chameleon(folder, sizes, {"mask_image_logits": True, "_name_or_path": f"Lumina-{sizes.side}"}, "shared")


def write_llamagen(folder: Path, sizes: Sizes) -> None:
    """Write the authors' .pt file, a T5 encoder and the image tokenizer."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    full = sizes.dim == PUBLISHED["llamagen"].dim
    width = 2048 if full else 24
    rows = {"codes": slice(0, sizes.vocab)}
    shapes = shapes_of(decoder_destinations(sizes.net(), {"": llamagen.ORIGINAL_RULES}, rows))
    shapes |= {
        "cls_embedding.cap_proj.fc1.weight": (sizes.dim, width),
        "cls_embedding.cap_proj.fc2.weight": (sizes.dim, sizes.dim),
        "cls_embedding.uncond_embedding": (120, width),
    }
    torch.save({"model": dict(random_tensors(shapes, torch.float32))}, folder / f"t2i_XL_{sizes.side}.pt")
    images = vqgan(sizes, LLAMAGEN, 8)
    torch.save({"model": dict(random_tensors(images, torch.float32))}, folder / "vq_ds16_t2i.pt")
    deep = {"d_ff": 5120, "num_layers": 24, "num_heads": 32, "d_kv": 64, "vocab_size": 32128}
    flat = {"d_ff": 32, "num_layers": 1, "num_heads": 3, "d_kv": 8, "vocab_size": 64}
    config = T5Config(d_model=width, feed_forward_proj="gated-gelu", **(deep if full else flat))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        encoder = T5EncoderModel(config).to(torch.bfloat16)
    encoder.save_pretrained(folder / "flan-t5-xl")
    del encoder
    write_tokenizer(folder / "words.json", 3)
    tokenizer = Tokenizer.from_file(str(folder / "words.json"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>").save_pretrained(folder / "flan-t5-xl")
    (folder / "words.json").unlink()


def write_janus(folder: Path, sizes: Sizes) -> None:
    net = sizes.net(head_hidden=sizes.dim, outputs=range(sizes.codes))
    shapes = shapes_of(decoder_destinations(net, {"model.language_model.": HF_DECODER}))
    shapes |= shapes_of(decoder_destinations(net, {"": janus.TRANSFORMERS.head_rules()}))
    shapes |= {
        "model.generation_embeddings.weight": (sizes.codes, 8),
        "model.generation_aligner.fc1.weight": (sizes.dim, 8),
        "model.generation_aligner.fc1.bias": (sizes.dim,),
        "model.generation_aligner.hidden_layers.0.weight": (sizes.dim, sizes.dim),
        "model.generation_aligner.hidden_layers.0.bias": (sizes.dim,),
        "lm_head.weight": (sizes.vocab, sizes.dim),
    }
    write_shards(folder, {**shapes, **vqgan(sizes, JANUS, 8, "model.vqmodel.")})
    special = {"bos_token_id": 1, "pad_token_id": 2, "generation_kwargs": {"boi_token_id": 4}}
    (folder / "generation_config.json").write_text(json.dumps(special))
    vision = {"image_size": sizes.side, "patch_size": 16}
    config = {"model_type": "janus", "text_config": sizes.config, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", 20)


def write_emu3(folder: Path, sizes: Sizes) -> None:
    vq = {
        "base_channels": sizes.images[0], "channel_multiplier": [w // sizes.images[0] for w in sizes.images],
        "codebook_size": sizes.codes,
    }  # fmt: skip
    config = {
        "model_type": "emu3", "text_config": {**sizes.config, "rope_theta": 1e6}, "vq_config": vq,
        "image_area": sizes.side**2,
    }  # fmt: skip
    with torch.device("meta"):
        images = VideoVQ(emu3.image_tokenizer_arch(vq, "emu3"))
    shapes = shapes_of(decoder_destinations(sizes.net(), {"model.text_model.": HF_DECODER}))
    shapes["lm_head.weight"] = (sizes.vocab, sizes.dim)
    write_shards(folder, {**shapes, **shapes_of(vqgan_destinations(images, {}, MOVQ_TRANSFORMERS, "model.vqmodel."))})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder / "tokenizer.json", 20)


WRITERS: dict[str, Callable[[Path, Sizes], None]] = {
    "anole": lambda folder, sizes: write_chameleon(folder, sizes, {}, "per_head"),
    "lumina": write_lumina,
    "llamagen": write_llamagen,
    "janus": write_janus,
    "emu3": write_emu3,
}
