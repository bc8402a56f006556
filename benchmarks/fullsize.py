"""Load and run models of their published sizes with random weights, from checkpoints in the published formats.

    python benchmarks/fullsize.py --out results.json --seconds 300   # all five, on a GPU
    python benchmarks/fullsize.py --only anole,emu3 --once anole,emu3
    python benchmarks/fullsize.py --tiny                             # the same files, small; a minute on a CPU

Each model is written, runs one `underdraw generate --compare --json`, and is deleted before the next. The images are
noise: measured are loading (seconds, peak memory) and generation (tokens per second, with and without a draft chain).
Results are saved after every model; a model that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
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

ROOT = Path(__file__).resolve().parent.parent
Shapes = dict[str, tuple[int, ...]]
SHARD, CHUNK, WRITER_THREADS = 2 * 10**9, 2**26, 8  # bytes per file, bytes per write, files at a time
MIN_SECONDS = 30  # no model takes less
MIN_FREE_BYTES = 24 * 10**9  # more than the largest model
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


def write_tokenizer(path: Path, first: int) -> None:
    """Write a tokenizer of a few words with ids from `first` on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: first + index for index, word in enumerate([*WORDS, "<unk>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))


def write_chameleon(folder: Path, sizes: Sizes, extra: dict[str, Any], rows: str) -> None:
    net = sizes.net(qk_norm="layer", qk_norm_heads=rows)
    shapes = shapes_of(decoder_destinations(net, {"model.": chameleon.DECODER_RULES}))
    shapes["lm_head.weight"] = (sizes.vocab, sizes.dim)
    images = vqgan(sizes, CHAMELEON, 256)
    if rows == "per_head":
        shapes |= {f"model.vqmodel.{name}": shape for name, shape in images.items()}
    else:
        torch.save({"state_dict": dict(random_tensors(images, torch.float32))}, folder / "vqgan.ckpt")
    write_shards(folder, shapes)
    config = {"model_type": "chameleon", **sizes.config, "vq_config": {"resolution": sizes.side}, **extra}
    (folder / "config.json").write_text(json.dumps(config))
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


def generate(
    folder: Path, options: argparse.Namespace, compile: str, plain_only: bool, limit: float | None
) -> dict[str, Any]:
    """Run `underdraw generate`: plain decoding only, or with a tree and then plain, with one load for both."""
    arguments = {
        "--model": str(folder),
        "--drafter": "jacobi",
        "--tree": "none" if plain_only else options.tree,
        "--seed": "1",
        "--device": options.device,
        "--dtype": options.dtype,
        "--compile": compile,
        "--out": str(folder / "picture.png"),
    }
    flags = ["--json"] if plain_only else ["--json", "--compare"]
    words = ["generate", " ".join(WORDS), *itertools.chain(*arguments.items()), *flags]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "underdraw", *words]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=limit)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"underdraw generate ended with {done.returncode}: {done.stderr[-4000:]}")
    facts = {"command": " ".join(["underdraw", *words]), "wall_seconds": round(seconds, 2), "said": done.stderr[-500:]}
    facts["picture_bytes"] = (folder / "picture.png").stat().st_size
    return {**facts, **json.loads(done.stdout.splitlines()[-1])}


def summarise(result: dict[str, Any]) -> str:
    """The numbers of a model in one line."""
    if "error" in result:
        return f"{result['model']}: FAILED after {result['seconds']:.0f} s: {result['error'].splitlines()[-1][:300]}"
    run, load = result["drawn"], result["drawn"]["load"]

    def gib(value: float | None) -> str:
        return "-" if value is None else f"{value / 2**30:.2f}"

    text = (
        f"{result['model']}: {gib(result['disk_bytes'])} GiB written in {result['write_seconds']:.1f} s, loaded in "
        f"{load['seconds']:.1f} s, {gib(load['weight_bytes'])} GiB of weights, peak device memory "
        f"{gib(load['peak_device_bytes'])} GiB for loading and {gib(run['peak_device_bytes'])} GiB for generation; "
        f"{run['settings']['tree']}: {run['tokens']} tokens at {run['tokens_per_second']:.1f} per second, "
        f"{run['pass_ms']:.2f} ms per pass"
    )
    if "plain_seconds" in run:
        rate = run["tokens"] / run["plain_seconds"]
        text += f"; plain: {rate:.1f} tokens per second, {run['plain_pass_ms']:.2f} ms per pass"
    return f"{text}; {result['seconds']:.0f} s in total"


def measure(name: str, sizes: Sizes, options: argparse.Namespace, limit: float | None) -> dict[str, Any]:
    """Write a model, generate with it, delete it; an error becomes part of the result."""
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=options.folder))
    result: dict[str, Any] = {"model": name, "storage": str(folder.parent)}
    try:
        WRITERS[name](folder, sizes)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        result |= {"write_seconds": seconds, "disk_bytes": size}
        print(f"{name}: {size / 2**30:.2f} GiB written in {seconds:.1f} s", flush=True)

        def remaining() -> float | None:
            return None if limit is None else max(limit - (time.perf_counter() - start), 1.0)

        try:
            result["drawn"] = generate(folder, options, options.compile, name in options.once.split(","), remaining())
        except RuntimeError as error:
            if options.compile == "off":
                raise
            print(f"{name}: {error}; trying again eagerly", flush=True)
            result |= {"failed": str(error), "drawn": generate(folder, options, "off", True, remaining())}
    except Exception:  # an error of one model must not stop the others
        result["error"] = traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**result, "seconds": time.perf_counter() - start}


def ram_folder() -> str | None:
    """/dev/shm if it is large enough, so that disk speed is not measured; None: the default temporary folder."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > MIN_FREE_BYTES else None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PUBLISHED), help="comma-separated models")
    parser.add_argument("--once", default="emu3", help="comma-separated models that only decode plainly: large ones")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--tree", default="chain:depth=8", help="tree policy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    compile = "capture" if torch.cuda.is_available() else "off"
    parser.add_argument("--compile", default=compile, help="as of `underdraw generate`; `off` is tried if it fails")
    parser.add_argument("--folder", default=ram_folder(), help="folder of the checkpoints; default: RAM, if enough")
    parser.add_argument("--seconds", type=float, help="time limit of the whole run; later models are skipped")
    parser.add_argument("--limit", type=float, help="time limit of one model in seconds")
    parser.add_argument("--out", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(PUBLISHED):
        parser.error(f"unknown models {', '.join(sorted(unknown))}; allowed: {', '.join(PUBLISHED)}")
    return options


def main() -> None:
    options = parse_options()
    missing = [name for name in ("typer", "rich", "tokenizers", "ftfy") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing packages that the command needs: {', '.join(missing)}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    start, results = time.perf_counter(), []
    for name in options.only.split(","):
        remaining = None if options.seconds is None else options.seconds - (time.perf_counter() - start)
        limits = [value for value in (remaining, options.limit) if value is not None]
        if remaining is not None and remaining < MIN_SECONDS:
            results.append({"model": name, "error": "no time was left", "seconds": 0.0})
        else:
            sizes = (TINY if options.tiny else PUBLISHED)[name]
            results.append(measure(name, sizes, options, min(limits, default=None)))
        print(summarise(results[-1]), flush=True)
        if options.out is not None:
            record = {"tiny": options.tiny, "torch": torch.__version__, "device": device, "results": results}
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    for result in results:
        print(result["error"] if "error" in result else summarise(result), flush=True)
    raise SystemExit(any("error" in result for result in results))


if __name__ == "__main__":
    main()
