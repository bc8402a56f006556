"""Write small checkpoints with random weights in every published layout, as their authors' files are laid out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vqgan_shapes import vqgan_shapes

State = dict[str, Tensor]
WORDS = "a red fox on the blue ice snow cat dog Generate an image of according to following prompt"
WIDTHS = (32, 32, 64)  # of image tokenizers: 4 pixels a code


def random_state(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int = 0) -> State:
    """Random weights whose logits are neither flat nor dominated by one token."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            noise = noise * 0.1 + float(name.endswith("weight"))
        elif not any(word in name for word in ("embed", "cls_embedding.uncond", "_norm.")):
            noise = noise * 1.4 * (shape[1] * int(torch.tensor(shape[2:]).prod())) ** -0.5
        elif "_norm." in name:
            noise = noise * 0.2 + float(name.endswith("weight"))
        state[name] = noise
    return state


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Fill a module of transformers with the same kind of weights, buffers included."""
    names = [(name, tuple(value.shape)) for name, value in module.state_dict().items() if value.is_floating_point()]
    state = random_state(names, seed)
    for name in state:
        if name.endswith("running_var"):
            state[name] = state[name].abs() + 0.5
    module.load_state_dict(state, strict=False)


def write_text_tokenizer(path: Path, first: int, specials: Mapping[str, int] | None = None) -> None:
    """A tokenizer.json of a few words with ids from `first` on, and special tokens with given ids."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: first + index for index, word in enumerate([*WORDS.split(), "<unk>", "*", ":", "160x96"])}
    digits = {str(number): first + len(words) + number for number in range(130)}
    tokenizer = Tokenizer(WordLevel({**words, **digits, **(specials or {})}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (specials or {})])
    tokenizer.save(str(path))


# Image tokenizers


def vqgan(kind: str, codes: int, widths: tuple[int, ...] = WIDTHS, seed: int = 5) -> State:
    return random_state(vqgan_shapes(kind, widths, codes, 8, 32), seed)


# Chameleon: Anole and Lumina

CHAMELEON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 9216,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def decoder_shapes(config: Mapping[str, Any], prefix: str = "model.") -> Iterable[tuple[str, tuple[int, ...]]]:
    """A decoder in transformers' layout, without its head."""
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    width = dim // config["num_attention_heads"]
    inner, shared = dim, width * config.get("num_key_value_heads", config["num_attention_heads"])
    yield f"{prefix}embed_tokens.weight", (config["vocab_size"], dim)
    yield f"{prefix}norm.weight", (dim,)
    for index in range(config["num_hidden_layers"]):
        name = f"{prefix}layers.{index}."
        yield f"{name}input_layernorm.weight", (dim,)
        yield f"{name}post_attention_layernorm.weight", (dim,)
        for part, rows in (("q", inner), ("k", shared), ("v", shared)):
            yield f"{name}self_attn.{part}_proj.weight", (rows, dim)
        yield f"{name}self_attn.o_proj.weight", (dim, inner)
        yield f"{name}mlp.gate_proj.weight", (ffn, dim)
        yield f"{name}mlp.up_proj.weight", (ffn, dim)
        yield f"{name}mlp.down_proj.weight", (dim, ffn)


def chameleon_shapes(config: Mapping[str, Any], rows: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield from decoder_shapes(config)
    yield "lm_head.weight", (config["vocab_size"], config["hidden_size"])
    width = config["hidden_size"] // config["num_attention_heads"]
    for index in range(config["num_hidden_layers"]):
        for part in "qk":
            yield f"model.layers.{index}.self_attn.{part}_norm.weight", (rows, width)
            yield f"model.layers.{index}.self_attn.{part}_norm.bias", (rows, width)


def write_shards(folder: Path, state: Mapping[str, Tensor], count: int) -> None:
    """Safetensors in `count` files with an index."""
    names, files = sorted(state), {}
    for index in range(count):
        part = {name: state[name].contiguous() for name in names[index::count]}
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, folder / file)
        files |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_anole(folder: Path, *, decoder: bool = True, rows: int = 4, **changes: Any) -> State:
    """leloy/Anole-7b-v0.1-hf, 4x4 codes. Without `decoder` the image decoder is in vqgan.ckpt alone."""
    folder.mkdir(parents=True, exist_ok=True)
    images = vqgan("chameleon", 8192, (32, 32, 32, 32, 64))
    state = random_state(chameleon_shapes(CHAMELEON, rows), 1)
    stored = {f"model.vqmodel.{name}": value for name, value in images.items() if decoder or "decoder." not in name}
    write_shards(folder, {**state, **stored}, 3)
    if not decoder:
        torch.save({"state_dict": {**images, "loss.logvar": torch.zeros(())}}, folder / "vqgan.ckpt")
    config = {"model_type": "chameleon", "vq_config": {"resolution": 64}, "bos_token_id": 1, **CHAMELEON, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_text_tokenizer(folder / ("tokenizer.json" if decoder else "text_tokenizer.json"), 8900)
    return {**state, **{f"images.{name}": value for name, value in images.items()}}


def write_lumina(folder: Path, *, side: int | None = 128) -> State:
    """Alpha-VLLM/Lumina-mGPT-7B-*, its size recorded as in saved pipelines; vqgan.ckpt is where LANTERN puts it."""
    state = random_state(chameleon_shapes(CHAMELEON, 1), 2)
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, state, 2)
    config = {"model_type": "chameleon", "mask_image_logits": True, **CHAMELEON, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    if side is not None:
        (folder / "underdraw.json").write_text(json.dumps({"size": f"{side}x{side}"}))
    write_text_tokenizer(folder / "tokenizer.json", 8900)
    companion = folder.parent / "chameleon" / "tokenizer"
    companion.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": vqgan("chameleon", 8192, (32, 32, 32, 32, 64))}, companion / "vqgan.ckpt")
    return state


# LlamaGen

LLAMAGEN = {"layers": 2, "dim": 64, "ffn": 96, "vocab": 64, "heads": 1}


def llamagen_shapes(kind: str, classes: int = 1000) -> Iterable[tuple[str, tuple[int, ...]]]:
    """The authors' format, "t2i" or "c2i"."""
    dim, ffn = LLAMAGEN["dim"], LLAMAGEN["ffn"]
    yield "tok_embeddings.weight", (LLAMAGEN["vocab"], dim)
    yield "output.weight", (LLAMAGEN["vocab"], dim)
    yield "norm.weight", (dim,)
    for index in range(LLAMAGEN["layers"]):
        yield f"layers.{index}.attention.wqkv.weight", (3 * dim, dim)
        yield f"layers.{index}.attention.wo.weight", (dim, dim)
        yield f"layers.{index}.feed_forward.w1.weight", (ffn, dim)
        yield f"layers.{index}.feed_forward.w3.weight", (ffn, dim)
        yield f"layers.{index}.feed_forward.w2.weight", (dim, ffn)
        yield f"layers.{index}.attention_norm.weight", (dim,)
        yield f"layers.{index}.ffn_norm.weight", (dim,)
    if kind == "c2i":
        yield "cls_embedding.embedding_table.weight", (classes + 1, dim)
    else:
        yield "cls_embedding.cap_proj.fc1.weight", (dim, 24)
        yield "cls_embedding.cap_proj.fc2.weight", (dim, dim)
        yield "cls_embedding.uncond_embedding", (120, 24)


def write_flan_t5(folder: Path) -> None:
    """A T5 encoder of width 24 with its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3, feed_forward_proj="gated-gelu"
    )
    T5EncoderModel(config).save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{word.lower(): 3 + index for index, word in enumerate(WORDS.split())}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def write_llamagen(folder: Path, kind: str, wrap: str | None = "model", name: str = "") -> tuple[Path, State]:
    """An original .pt, wrapped as {"model": ...} with the training's arguments or, with None, bare as from FSDP."""
    folder.mkdir(parents=True, exist_ok=True)
    state = random_state(llamagen_shapes(kind), 3)
    path = folder / (name or f"{kind}_XL_64.pt")
    extra = {"steps": 7, "args": argparse.Namespace(gpt_model="GPT-XL")}
    torch.save(state if wrap is None else {wrap: state, **extra}, path)
    torch.save({"model": vqgan("llamagen", LLAMAGEN["vocab"], (32, 32, 32, 32, 64))}, folder / f"vq_ds16_{kind}.pt")
    if kind == "t2i":
        write_flan_t5(folder / "t5" / "flan-t5-xl")
    return path, state


def converted(state: Mapping[str, Tensor]) -> State:
    """LANTERN's names for an original LlamaGen state dict."""
    out = {}
    names = {
        "tok_embeddings.": "model.embed_tokens.", "output.": "lm_head.", "norm.": "model.norm.",
        "cls_embedding.": "model.cls_embedding.",
    }  # fmt: skip
    inner = {
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    for name, value in state.items():
        if "wqkv" in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                out[f"model.{name.replace('attention.wqkv', f'self_attn.{part}_proj')}"] = rows
        elif name.startswith("layers."):
            for old, new in inner.items():
                name = name.replace(old, new)
            out[f"model.{name}"] = value
        else:
            old, new = next(pair for pair in names.items() if name.startswith(pair[0]))
            out[name.replace(old, new, 1)] = value
    return out


def write_llamagen_converted(folder: Path) -> State:
    """jadohu/LlamaGen-T2I, with its companions where LANTERN puts them: one folder up."""
    folder.mkdir(parents=True, exist_ok=True)
    path, state = write_llamagen(folder.parent, "t2i")
    path.unlink()
    save_file({name: value.contiguous() for name, value in converted(state).items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": LLAMAGEN["dim"],
        "intermediate_size": LLAMAGEN["ffn"], "num_hidden_layers": LLAMAGEN["layers"],
        "num_attention_heads": LLAMAGEN["heads"], "num_key_value_heads": LLAMAGEN["heads"],
        "vocab_size": LLAMAGEN["vocab"], "rms_norm_eps": 1e-5, "block_size": 16, "cls_token_num": 120,
        "caption_dim": 24, "input_type": "t2i", "rope_base": 10000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return state


# Janus and Emu3: transformers writes them itself


def write_janus(folder: Path) -> Any:
    """A model saved by transformers; 4x4 codes."""
    from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

    config = JanusConfig(
        text_config={
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320, "max_position_embeddings": 128,
            "bos_token_id": 1, "pad_token_id": 2, "eos_token_id": 3,
        },
        vision_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
            "projection_dim": 32, "num_image_tokens": 16,
        },
        vq_config={
            "embed_dim": 8, "num_embeddings": 64, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1, 2], "num_patches": 4, "projection_dim": 32, "image_token_embed_dim": 32,
        },
        image_token_id=5,
    )  # fmt: skip
    model = JanusForConditionalGeneration(config).eval()
    randomise(model, 4)
    model.generation_config = GenerationConfig(
        bos_token_id=1, pad_token_id=2, eos_token_id=3, guidance_scale=5, generation_kwargs={"boi_token_id": 4}
    )
    model.save_pretrained(folder, max_shard_size="40KB")
    write_text_tokenizer(folder / "tokenizer.json", 20, {"<begin_of_image>": 4, "<|User|>": 6, "<|Assistant|>": 7})
    return model


EMU3_SPECIALS = {
    "<|extra_203|>": 1, "<|extra_204|>": 2, "<|image start|>": 3, "<|image end|>": 4, "<|image token|>": 5,
    "<|extra_200|>": 6, "<|extra_201|>": 7, "<image>": 8,
}  # fmt: skip


def write_emu3(folder: Path) -> Any:
    """A model saved by transformers; 64 codes of 8x8 pixels, images of about 32x32."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    visual = {f"<|visual token {code:06d}|>": 240 + code for code in range(64)}
    config = Emu3Config(
        text_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 304, "max_position_embeddings": 256, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        vq_config={
            "codebook_size": 64, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2], "hidden_size": 64,
            "attn_resolutions": [3],
        },
        vocabulary_map={**EMU3_SPECIALS, **visual},
    )  # fmt: skip
    model = Emu3ForConditionalGeneration(config).eval()
    randomise(model, 6)
    model.save_pretrained(folder, max_shard_size="200KB")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "image_area": 32 * 32}))
    write_text_tokenizer(folder / "tokenizer.json", 20, EMU3_SPECIALS)
    return model


# Drafters


def write_drafter(
    folder: Path,
    kind: str,
    *,
    suffix: str = "bin",
    rows: int = 4,
    vocab: int = 9216,
    input_type: str | None = None,
) -> State:
    """LANTERN's published heads: "anole" (16 tensors) or "llamagen" (11, for the image size of `input_type`)."""
    folder.mkdir(parents=True, exist_ok=True)
    is_llamagen = kind == "llamagen"
    config: dict[str, Any] = {**CHAMELEON, "num_hidden_layers": 1, "vocab_size": vocab}
    if is_llamagen:
        config |= {
            "hidden_size": LLAMAGEN["dim"],
            "intermediate_size": LLAMAGEN["ffn"],
            "vocab_size": LLAMAGEN["vocab"],
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "caption_dim": 24,
        }
    if input_type is not None:
        config["input_type"] = input_type
    dim = config["hidden_size"]
    shapes = [pair for pair in decoder_shapes(config, "") if pair[0] != "norm.weight"]
    if is_llamagen:
        shapes = [pair for pair in shapes if "input_layernorm" not in pair[0]]
    else:
        norms = [(name[6:], shape) for name, shape in chameleon_shapes(config, rows) if "_norm." in name]
        shapes += norms
    shapes += [("fc.weight", (dim, 2 * dim)), ("fc.bias", (dim,))]
    state = random_state(shapes, seed=7)
    if suffix == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama" if is_llamagen else "chameleon", **config}))
    return state
