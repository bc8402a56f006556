"""`custom_generate` against transformers' own `generate`, side by side, with equal greedy codes.

    python benchmarks/custom_generate.py [--family emu3] [--size small|7b] [--accuracy SHARE ...] [--device cuda]

No files are needed: the models of benchmarks/grid_models.py are made on the device. `small` is for a CPU; `7b` has the
sizes of Janus-Pro-7B's decoder and takes about 30 GB of memory in bfloat16. Each level of accuracy is a model whose
head predicts that share of the cells of its grids: the higher, the more drafts are right. Both loops draw the same
image with guidance. The tree `none` compares passes alone; the others add drafts.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from grid_models import FAMILIES, GridModel, Sizes

from underdraw.bench.environment import describe_machine
from underdraw.integrations.transformers import clear_cache

SIZES = {
    "test": Sizes(192, 384, 2, 2, side=8),
    "small": Sizes(256, 704, 4, 4, side=16),
    "7b": Sizes(4096, 11008, 30, 32, side=16, codes=16384, words=102400),
}
CELLS = {"test": 4096, "small": 16384, "7b": 24576}  # of the grids that heads are fitted to
TREES = {"cpu": ("none", "chain:depth=16", "auto"), "cuda": ("none", "chain:depth=31", "auto")}


def timed(draw: Callable[[], Any], repeats: int, device: torch.device) -> tuple[float, Any]:
    """Median seconds of `repeats` calls, and the result of the last one; on a CPU those of the one thread in use."""
    seconds, clock = [], time.process_time if device.type == "cpu" else time.perf_counter
    for _ in range(repeats):
        start = clock()
        result = draw()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return statistics.median(seconds), result


def compare(model: GridModel, trees: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Seconds of a greedy image with both loops, and passes and equality of ours; yields what is measured so far."""
    clear_cache()  # the weights have changed
    device = model.model.device
    base, expected = timed(lambda: model.draw_plain(do_sample=False), repeats if device.type == "cpu" else 1, device)
    print(f"  transformers: {base:.2f} s", flush=True)
    results: dict[str, Any] = {}
    for tree in trees:
        draw = functools.partial(model.draw, do_sample=False, tree=tree)
        draw()  # copies weights, captures passes, measures costs
        seconds, (codes, passes) = timed(draw, repeats, device)
        speedup, rate, equal = base / seconds, len(codes) / passes, float((codes == expected).float().mean())
        results[tree] = {"seconds": seconds, "speedup": speedup, "tokens_per_pass": rate, "equal_codes": equal}
        print(
            f"  tree {tree}: {seconds:.2f} s, {speedup:.2f} times as fast, {rate:.2f} tokens per pass, "
            f"{equal:.0%} equal codes",
            flush=True,
        )
        yield {"transformers_seconds": base, "tokens": len(expected), "trees": results}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="janus")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--side", type=int, help="codes per side; default: 16")
    parser.add_argument("--accuracy", type=float, nargs="+", default=[0.8, 0.75], help="levels of accuracy")
    parser.add_argument("--repeats", type=int, default=3, help="timed images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # so that the time of the process is the time it takes, whatever else is running
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    sizes = SIZES[options.size]
    if options.side is not None:
        sizes = Sizes(**{**vars(sizes), "side": options.side})
    record: dict[str, Any] = {
        "kind": "custom-generate", "model": f"{options.family}, {options.size}", "side": sizes.side, "dtype": dtype,
        "transformers": transformers.__version__, "machine": describe_machine(device), "levels": [],
    }  # fmt: skip
    model = FAMILIES[options.family](sizes, options.device, getattr(torch, dtype))

    for index, accuracy in enumerate(options.accuracy):
        noise, reached = model.calibrate(accuracy, CELLS[options.size])
        print(f"accuracy {reached:.2f}", flush=True)
        for level in compare(model, TREES[device.type], options.repeats):
            record["levels"][index:] = [{"accuracy": reached, "noise": noise, **level}]
            if options.out is not None:
                options.out.write_text(json.dumps(record, indent=1) + "\n")
        model.scale_noise(1 / noise)  # for the next search


if __name__ == "__main__":
    main()
