"""Models of their true sizes, with random weights: written as published, loaded, and asked for a whole picture.

    python benchmarks/fullsize.py --out results.json              # all five, on a GPU with 64 GiB of disk
    python benchmarks/fullsize.py --only anole,emu3 --trees none
    python benchmarks/fullsize.py --tiny                          # the same files, small; seconds on a CPU

Each model is written, loaded and deleted before the next. The pictures are noise: what is measured is loading (seconds,
peak memory) and drawing (tokens a second). `--command` also draws through `underdraw generate`.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from underdraw.models import chameleon, emu3, janus, llamagen
from underdraw.models.images import CHAMELEON, JANUS, LLAMAGEN, Naming
from underdraw.models.weights import HF_DECODER, Slot, decoder_slots, module_slots
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch, Transformer
from underdraw.nn.vqgan import VQGAN, VQArch
from underdraw.nn.vqvideo import VideoVQ
from underdraw.pipeline import Pipeline

Shapes = dict[str, tuple[int, ...]]
SHARD = 4 * 10**9  # bytes a file
WORDS = ["a", "red", "fox", "on", "the", "blue", "ice"]


@dataclass(frozen=True)
class Sizes:
    """A decoder and its picture; `side` in pixels."""

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
        """The decoder, without memory."""
        arch = Arch(
            self.dim, self.layers, self.heads, self.ffn, self.vocab, Rope.one_axis(self.dim // self.heads),
            kv_heads=self.kv_heads, **options,
        )  # fmt: skip
        with torch.device("meta"):
            return Transformer(arch)


TRUE = {
    "anole": Sizes(4096, 32, 32, 11008, 65536, 512, codes=8192),
    "lumina": Sizes(4096, 32, 32, 11008, 65536, 768, codes=8192),
    "llamagen": Sizes(1280, 36, 20, 3584, 16384, 512),
    "janus": Sizes(4096, 30, 32, 11008, 102400, 384),
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


def shapes_of(slots: Mapping[str, Slot]) -> Shapes:
    return {name: tuple(slot.into.shape) for name, slot in slots.items() if slot.into.ndim}


def vqgan(sizes: Sizes, naming: Naming, code_dim: int, prefix: str = "") -> Shapes:
    arch = VQArch(sizes.images, codes=sizes.codes, code_dim=code_dim, deep_attention=naming.unit_codes)
    with torch.device("meta"):
        model = VQGAN(arch)
    levels = 0 if naming is CHAMELEON else len(sizes.images)
    return shapes_of(module_slots(model, prefix, lambda name: naming.published(name, levels)))


def tensors(shapes: Shapes, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random weights at the scale of trained ones, drawn where that is fast."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    for name, shape in shapes.items():
        value = torch.empty(shape, dtype=dtype, device=device).normal_()
        if len(shape) == 1 or "_norm." in name:
            value = value.mul_(0.1).add_(float(name.endswith("weight") or name.endswith("var")))
        elif "embed" not in name:
            value.mul_(1.2 * (shape[1] * torch.Size(shape[2:]).numel()) ** -0.5)
        yield name, value.cpu()


def write_shards(folder: Path, shapes: Shapes) -> None:
    """bfloat16 safetensors with an index, a few gigabytes at a time."""
    files: dict[str, str] = {}
    part: dict[str, Tensor] = {}

    def flush() -> None:
        if part:
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            save_file(part, folder / file)
            files.update(dict.fromkeys(part, file))
            part.clear()

    for name, value in tensors(shapes, torch.bfloat16):
        part[name] = value
        if sum(tensor.nbytes for tensor in part.values()) > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def write_text(path: Path, first: int) -> None:
    """A tokenizer of a few words with ids from `first` on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: first + index for index, word in enumerate([*WORDS, "<unk>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))


def write_chameleon(folder: Path, sizes: Sizes, extra: dict[str, Any], rows: str) -> None:
    net = sizes.net(qk_norm="layer", qk_norm_heads=rows)
    shapes = shapes_of(decoder_slots(net, chameleon.DECODER, "model."))
    shapes["lm_head.weight"] = (sizes.vocab, sizes.dim)
    images = vqgan(sizes, CHAMELEON, 256)
    if rows == "per_head":
        shapes |= {f"model.vqmodel.{name}": shape for name, shape in images.items()}
    else:
        torch.save({"state_dict": dict(tensors(images, torch.float32))}, folder / "vqgan.ckpt")
    write_shards(folder, shapes)
    config = {"model_type": "chameleon", **sizes.config, "vq_config": {"resolution": sizes.side}, **extra}
    (folder / "config.json").write_text(json.dumps(config))
    write_text(folder / "tokenizer.json", 8900)


def write_anole(folder: Path, sizes: Sizes) -> None:
    write_chameleon(folder, sizes, {}, "per_head")


def write_lumina(folder: Path, sizes: Sizes) -> None:
    write_chameleon(folder, sizes, {"mask_image_logits": True, "_name_or_path": f"Lumina-{sizes.side}"}, "shared")


def write_llamagen(folder: Path, sizes: Sizes) -> None:
    """The authors' .pt, with a T5 encoder and the image tokenizer beside it."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    full = sizes.dim == TRUE["llamagen"].dim
    width = 2048 if full else 24
    shapes = shapes_of(decoder_slots(sizes.net(), llamagen.ORIGINAL, rows={"codes": slice(0, sizes.vocab)}))
    shapes |= {
        "cls_embedding.cap_proj.fc1.weight": (sizes.dim, width),
        "cls_embedding.cap_proj.fc2.weight": (sizes.dim, sizes.dim),
        "cls_embedding.uncond_embedding": (120, width),
    }
    torch.save({"model": dict(tensors(shapes, torch.float32))}, folder / f"t2i_XL_{sizes.side}.pt")
    images = vqgan(sizes, LLAMAGEN, 8)
    torch.save({"model": dict(tensors(images, torch.float32))}, folder / "vq_ds16_t2i.pt")
    deep = {"d_ff": 5120, "num_layers": 24, "num_heads": 32, "d_kv": 64, "vocab_size": 32128}
    flat = {"d_ff": 32, "num_layers": 1, "num_heads": 3, "d_kv": 8, "vocab_size": 64}
    config = T5Config(d_model=width, feed_forward_proj="gated-gelu", **(deep if full else flat))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        encoder = T5EncoderModel(config).to(torch.bfloat16)
    encoder.save_pretrained(folder / "flan-t5-xl")
    del encoder
    write_text(folder / "words.json", 3)
    tokenizer = Tokenizer.from_file(str(folder / "words.json"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<unk>").save_pretrained(folder / "flan-t5-xl")
    (folder / "words.json").unlink()


def write_janus(folder: Path, sizes: Sizes) -> None:
    net = sizes.net(head_hidden=sizes.dim, outputs=range(sizes.codes))
    shapes = shapes_of(decoder_slots(net, HF_DECODER, "model.language_model."))
    shapes |= shapes_of(decoder_slots(net, janus.HEAD, "model.generation_head."))
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
    write_text(folder / "tokenizer.json", 20)


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
        images = VideoVQ(emu3.image_arch(config))
    shapes = shapes_of(decoder_slots(sizes.net(), HF_DECODER, "model.text_model."))
    shapes["lm_head.weight"] = (sizes.vocab, sizes.dim)
    write_shards(folder, {**shapes, **shapes_of(module_slots(images, "model.vqmodel."))})
    (folder / "config.json").write_text(json.dumps(config))
    write_text(folder / "tokenizer.json", 20)


WRITERS: dict[str, Callable[[Path, Sizes], None]] = {
    "anole": write_anole,
    "lumina": write_lumina,
    "llamagen": write_llamagen,
    "janus": write_janus,
    "emu3": write_emu3,
}


def host_peak() -> int:
    """Bytes of this process's memory at its highest; mapped files count, though the system can take them back."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """A call in a process of its own, so that its memory is its own, too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def measure(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Load what was written, and draw with it."""
    cuda = given.device != "cpu" and torch.cuda.is_available()
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if cuda:
        torch.zeros(1, device="cuda")  # waking the device is no part of loading
    began = time.perf_counter()
    pipe = Pipeline.from_pretrained(folder, drafter="jacobi", tree="none", device=given.device, dtype=given.dtype)
    if cuda:
        torch.cuda.synchronize()
    loaded = time.perf_counter() - began
    modules = [m for m in (pipe.model.target.net, pipe.model.target.projection, pipe.model.images) if m is not None]
    weights = sum(tensor.nbytes for module in modules for tensor in module.state_dict().values())  # type: ignore[attr-defined]
    result: dict[str, Any] = {
        "model": name, "disk_bytes": disk, "load_seconds": loaded, "weight_bytes": weights,
        "load_peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "load_peak_host_bytes": host_peak(), "pictures": [],
    }  # fmt: skip
    for tree in given.trees:
        pipe.tree = tree
        out = pipe(" ".join(WORDS), seed=1)
        out.images[0].save(folder / "picture.png")
        result["pictures"].append(
            {
                "tree": tree, "size": list(out.images[0].size), "tokens": out.stats.tokens, "passes": out.stats.passes,
                "seconds": out.stats.seconds, "tokens_per_second": out.stats.tokens / out.stats.seconds,
                "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            }
        )  # fmt: skip
    return result


def through_the_command(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A whole picture by `underdraw generate`, in a process of its own."""
    words = [
        sys.executable, "-m", "underdraw", "generate", " ".join(WORDS), "--model", str(folder), "--drafter", "jacobi",
        "--tree", given.trees[-1], "--seed", "1", "--out", str(folder / "command.png"), "--device", given.device,
        "--dtype", given.dtype, "--json",
    ]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"underdraw generate failed: {done.stderr}")
    return {"wall_seconds": time.perf_counter() - began, "picture_bytes": (folder / "command.png").stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TRUE), help="models, with commas between")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--trees", default="none,chain:depth=8", help="tree policies, with commas between")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written; a temporary one by default")
    parser.add_argument("--command", action="store_true", help="draw through `underdraw generate`, too")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    given = parser.parse_args()
    given.trees = given.trees.split(",")
    known = TINY if given.tiny else TRUE
    unknown = set(given.only.split(",")) - set(known)
    if unknown:
        parser.error(f"unknown models {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    results = []
    for name in given.only.split(","):
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=given.folder))
        try:
            apart(WRITERS[name], folder, known[name])
            results.append(apart(measure, name, folder, given))
            if given.command:
                results[-1]["command"] = through_the_command(folder, given)
        finally:
            shutil.rmtree(folder)
        print(json.dumps(results[-1]), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps({"tiny": given.tiny, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
