"""Memory and speed of the decoders of all families, with random weights in the published sizes.

    python benchmarks/families.py --out benchmarks/results/families.json           # on a GPU: about 100 s
    python benchmarks/families.py --no-speed --out memory.json                     # memory alone, anywhere
    underdraw plot --page docs/models.md                                           # the tables of the page

Memory is computed from the configurations. Times are medians of the decode loop's passes over one node (a token of
plain decoding) and over 64 nodes (a tree), with guidance and 540 tokens in the KV cache. A model that fails does not
stop the others, and results are saved after each of them. A model that is not measured keeps the speed that the result
file had before, with the commit of that measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from underdraw.bench.engine import CONTEXT, EngineBench, EngineBenchConfig, weight_bytes
from underdraw.bench.environment import describe_machine
from underdraw.bench.instrumentation import copy_bandwidth
from underdraw.models.family import ImageSize, ModelSpec, SamplingDefaults
from underdraw.models.inspect import count_parameters, estimate_memory
from underdraw.models.loading import resolve_placement
from underdraw.models.random_weights import SHAPES, model_shape
from underdraw.nn.quantization import decoder_bytes
from underdraw.nn.transformer import Arch

# Family, checkpoint of that size, dtype of its files, and which rows of the LM head they have.
CHECKPOINTS = {
    "anole-7b": ("anole", "leloy/Anole-7b-v0.1-hf", torch.bfloat16, "all"),
    "lumina-7b": ("lumina", "Alpha-VLLM/Lumina-mGPT-7B-768", torch.bfloat16, "all"),
    "lumina-2-7b": ("lumina2", "Alpha-VLLM/Lumina-mGPT-2.0", torch.bfloat16, "all"),
    "llamagen-xl": ("llamagen", "peizesun/llamagen_t2i/t2i_XL_stage2_512.pt", torch.float32, "codes"),
    "janus-1b": ("janus", "deepseek-community/Janus-Pro-1B", torch.bfloat16, "all"),
    "janus-7b": ("janus", "deepseek-community/Janus-Pro-7B", torch.bfloat16, "all"),
    "emu3-8b": ("emu3", "Emu3-community/Emu3-Gen-hf", torch.bfloat16, "all"),
    "glm-image-9b": ("glm_image", "zai-org/GLM-Image", torch.bfloat16, "codes"),
    "simplear-0.5b": ("simplear", "Daniel0724/SimpleAR-0.5B-RL", torch.bfloat16, "tied"),
    "simplear-1.5b": ("simplear", "Daniel0724/SimpleAR-1.5B-RL", torch.bfloat16, "tied"),
    "toy": ("toy", "toy", torch.float32, "codes"),
}
NODES = 64


def describe(name: str) -> dict[str, Any]:
    """What follows from a model's configuration: parameters, bytes of the files and of memory."""
    shape = model_shape(name)
    family, checkpoint, stored, head = CHECKPOINTS[name]
    size = ImageSize(shape.layout.height, shape.layout.width)
    spec = ModelSpec(shape.arch, SamplingDefaults(shape.guidance), (size,), lambda _: shape.layout)
    return {
        "name": name,
        "family": family,
        "checkpoint": checkpoint,
        "parameters": count_parameters(shape.arch),
        "file_bytes": file_bytes(shape.arch, head, stored),
        "tokens": shape.layout.stop - shape.layout.start,
        "guidance": shape.guidance,
        "memory": {key: asdict(value) for key, value in estimate_memory(spec).items()},
    }


def file_bytes(arch: Arch, head: str, dtype: torch.dtype) -> int:
    """Bytes of a decoder's weights as published: a head has rows for text tokens too, or is the embedding."""
    if head == "codes":
        return decoder_bytes(arch, "full", dtype)
    text_rows = arch.vocab - len(arch.outputs or ())
    rows = -len(arch.outputs or ()) if head == "tied" else text_rows
    return decoder_bytes(arch, "full", dtype) + rows * arch.dim * dtype.itemsize


def measure(name: str, options: argparse.Namespace, bandwidth: float) -> dict[str, float]:
    """Milliseconds of passes over one node and over NODES nodes, and the bandwidth bound."""
    placement = resolve_placement(options.device, options.dtype)
    compile = "capture" if placement.device.type == "cuda" else "off"
    config = EngineBenchConfig(name, placement, compile, passes=options.passes, sizes=(1, NODES))
    bench = EngineBench(config, lambda stage: None)
    milliseconds = bench.time_sizes()
    return {
        "floor_ms": 1000 * weight_bytes(bench.target) / bandwidth,
        "plain_ms": milliseconds["1"],
        "tree_ms": milliseconds[str(NODES)],
    }


def keep_earlier_speeds(record: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Give models without a speed the one of an earlier record, and its commit."""
    speeds = {model["name"]: model["speed"] for model in earlier["models"] if "speed" in model}
    for model in record["models"]:
        if "speed" not in model and model["name"] in speeds:
            model["speed"] = {"commit": earlier["machine"]["commit"], **speeds[model["name"]]}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "toy"])
    parser.add_argument("--speed", action=argparse.BooleanOptionalAction, default=True, help="also measure speed")
    parser.add_argument("--passes", type=int, default=20, help="timed passes of each size")
    parser.add_argument("--seconds", type=float, default=600.0, help="after this time, no further model is measured")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    options = parse_options()
    placement, start = resolve_placement(options.device, options.dtype), time.perf_counter()
    bandwidth = copy_bandwidth(placement.device) if options.speed else 0.0
    record: dict[str, Any] = {
        "kind": "families", "machine": describe_machine(placement.device), "context": CONTEXT, "nodes": NODES,
        "dtype": str(placement.dtype).removeprefix("torch."),
        "models": [describe(name) for name in options.only],
    }  # fmt: skip
    earlier = json.loads(options.out.read_text()) if options.out.exists() else {"models": []}
    for model in record["models"]:
        if options.speed and time.perf_counter() - start < options.seconds:
            try:
                model["speed"] = measure(model["name"], options, bandwidth)
            except Exception as error:  # the other models are measured all the same
                model["error"] = f"{type(error).__name__}: {error}"[:500]
            gc.collect()
            if placement.device.type == "cuda":
                torch.cuda.empty_cache()
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(
            f"{time.perf_counter() - start:6.1f} s {model['name']}: {model.get('speed') or model.get('error')}",
            flush=True,
        )
    keep_earlier_speeds(record, earlier)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
