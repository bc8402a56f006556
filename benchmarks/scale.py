"""What an image costs besides its passes: prefill, codes to pixels, PNG, and which of it hides behind the passes.

    python benchmarks/scale.py --out h200.json                    # a GPU, bfloat16, random weights; about 40 s
    python benchmarks/scale.py --models toy --device cpu          # a trial

Random weights of published shapes; the image tokenizer is a VQGAN of Chameleon's size for every model. `png` compresses
noise, the worst case, and a smooth picture. `pass_with_png` is a pass while a thread compresses PNG files, as workers
of `underdraw generate` do: where it equals `pass`, PNG files cost nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from underdraw.bench.environment import describe_machine
from underdraw.drafters.forced import Forced
from underdraw.engine.cuda_graphs import GraphCache, make_graph_cache
from underdraw.engine.decode import collect_passes, decode
from underdraw.images import encode_png
from underdraw.models.family import Placement
from underdraw.models.loading import resolve_placement
from underdraw.models.random_weights import ModelShape, model_shape, random_target
from underdraw.models.weight_map import allocate
from underdraw.nn.target import DecoderTarget
from underdraw.policies.fixed import NoTree
from underdraw.sampling import Sampler
from underdraw.tokenizers.vqgan import VQGAN, VQArch
from underdraw.verifiers.exact import Exact

CHAMELEON_VQGAN = VQArch(widths=(128, 128, 256, 256, 512))
TOY_VQGAN = VQArch(widths=(32, 32), codes=128, latent=32, code_dim=32)
WARMUP, PASSES = 6, 24
SIZES = (1, 8, 16, 32, 64, 128)  # nodes of a pass


def median_ms(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median wall time of a call, after a warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return round(1000 * statistics.median(seconds[1:]), 3)


def time_prefill(target: DecoderTarget, shape: ModelShape, batch: int, device: torch.device) -> float:
    """Milliseconds until the first tokens of `batch` prompts."""
    prompts = shape.prompts(batch)
    return median_ms(lambda: target.open(prompts, shape.layout, guidance=shape.guidance), device, repeats=3)


def time_passes(target: DecoderTarget, shape: ModelShape, graphs: GraphCache | None, device: torch.device) -> float:
    """Median milliseconds of a pass that accepts one token."""
    sampler = Sampler(shape.layout, [0], top_k=shape.top_k, device=device)
    steps = decode(
        target, Forced(), NoTree(), Exact(), shape.prompts(1), sampler, guidance=shape.guidance, graphs=graphs
    )
    seconds = [step.seconds for step in collect_passes(steps, WARMUP + PASSES)]
    return round(1000 * statistics.median(seconds[WARMUP:]), 3)


def time_pixels(shape: ModelShape, device: torch.device, *, is_toy: bool) -> float:
    """Milliseconds of codes to pixels for one image, float32, copied to the host."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = allocate(lambda: VQGAN(TOY_VQGAN if is_toy else CHAMELEON_VQGAN), Placement(device, torch.float32))
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
    codes = torch.zeros(1, shape.layout.height, shape.layout.width, dtype=torch.int64, device=device)
    with torch.inference_mode():
        return median_ms(lambda: model.decode(codes).float().cpu(), device)


def pictures(side: int) -> dict[str, Image.Image]:
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    ramp = np.linspace(0, 255, side).astype(np.uint8)
    smooth = np.stack([np.tile(ramp, (side, 1)), np.tile(ramp[:, None], (1, side)), np.full((side, side), 90)], axis=2)
    return {"noise": Image.fromarray(noise), "smooth": Image.fromarray(smooth.astype(np.uint8))}


def measure(name: str, placement: Placement) -> dict[str, Any]:
    """All times of one model, in milliseconds."""
    shape, device, is_toy = model_shape(name), placement.device, name == "toy"
    target = random_target(shape.arch, placement)
    graphs = make_graph_cache(device, "auto", "row-invariant")
    record: dict[str, Any] = {"model": f"random:{name}", "tokens": shape.layout.stop - shape.layout.start - 1}
    record["prefill_ms"] = {str(batch): time_prefill(target, shape, batch, device) for batch in (1, 8)}
    sizes = (1,) if graphs is None else SIZES
    record["pass_ms"] = {
        str(size): time_passes(target, shape, None if graphs is None else graphs.with_min_bucket(size), device)
        for size in sizes
    }
    side = shape.layout.width * (2 if is_toy else CHAMELEON_VQGAN.downsample)
    record["pixels_ms"], record["side"] = time_pixels(shape, device, is_toy=is_toy), side
    images = pictures(side)
    cpu = torch.device("cpu")
    record["png_ms"] = {kind: median_ms(lambda image=image: encode_png(image), cpu) for kind, image in images.items()}
    record["png_bytes"] = {kind: len(encode_png(image)) for kind, image in images.items()}
    stop = threading.Event()

    def compress() -> None:
        while not stop.is_set():
            encode_png(images["noise"])

    thread = threading.Thread(target=compress)
    thread.start()
    try:
        record["pass_with_png_ms"] = time_passes(target, shape, graphs, device)
    finally:
        stop.set()
        thread.join()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="anole-7b,janus-7b", help="comma-separated shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    placement = resolve_placement(options.device, options.dtype)
    results = []
    for name in options.models.split(","):
        results.append(measure(name, placement))
        record = {"machine": describe_machine(placement.device), "dtype": str(placement.dtype), "results": results}
        if options.out is not None:  # after every model: a session may end
            options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(results[-1]))


if __name__ == "__main__":
    main()
