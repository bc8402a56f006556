"""`custom_generate` against transformers' own `generate`, side by side, with equal greedy codes.

    python benchmarks/custom_generate.py [--family janus emu3 chameleon glm_image] [--size small|published]
                                         [--accuracy SHARE ...] [--device cuda]

No files are needed: the models of benchmarks/grid_families.py are made on the device. `small` is for a CPU; `published`
has the sizes of the 7B to 9B checkpoints and takes up to 40 GB of memory in bfloat16. Each level of accuracy is a model
that predicts (guided) that share of the cells of its grids: the higher, the more drafts are right. Both loops draw the
same image. The tree `none` compares passes alone; the others add drafts.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from grid_families import FAMILIES
from grid_models import GridModel, Sizes

from underdraw.bench.environment import describe_machine
from underdraw.integrations.transformers import clear_cache

SIZES = {"test": Sizes(192, 384, 2, 2, side=8), "small": Sizes(256, 704, 4, 4, side=16)}
PUBLISHED = {
    "janus": Sizes(4096, 11008, 30, 32, side=16, codes=16384, words=102400),
    "emu3": Sizes(4096, 14336, 32, 32, side=16, codes=32768, words=151854, kv_heads=8),
    "chameleon": Sizes(4096, 11008, 32, 32, side=16, codes=8192, words=65536),
    "glm_image": Sizes(4096, 13696, 40, 32, side=16, codes=16384, words=151552, kv_heads=2),
}
CELLS = {"test": 4096, "small": 16384, "published": 24576}  # of the grids that heads are fitted to
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
    draw_plain = functools.partial(model.draw_plain, do_sample=False)
    if device.type == "cuda":
        draw_plain()  # loads kernels
    base, expected = timed(draw_plain, repeats if device.type == "cpu" else 1, device)
    print(f"  transformers: {base:.2f} s", flush=True)
    results: dict[str, Any] = {}
    for tree in trees:
        draw = functools.partial(model.draw, do_sample=False, tree=tree)
        draw()  # copies weights, captures passes, measures costs
        seconds, (codes, passes) = timed(draw, repeats, device)
        rate, equal = len(codes) / passes, codes == expected
        first = None if equal.all() else int((~equal).nonzero()[0])  # in bfloat16, images part at a near-tie
        results[tree] = {
            "seconds": seconds, "speedup": base / seconds, "tokens_per_pass": rate,
            "equal_codes": float(equal.float().mean()), "first_difference": first,
        }  # fmt: skip
        print(
            f"  tree {tree}: {seconds:.2f} s, {base / seconds:.2f} times as fast, {rate:.2f} tokens per pass, "
            f"{'all codes equal' if first is None else f'first {first} of {len(codes)} codes equal'}",
            flush=True,
        )
        yield {"transformers_seconds": base, "trees": results}


def measure_family(family: str, options: argparse.Namespace, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Results of one family's model at all levels; yields what is measured so far."""
    start = time.perf_counter()
    sizes = PUBLISHED[family] if options.size == "published" else SIZES[options.size]
    if options.side is not None:
        sizes = replace(sizes, side=options.side)
    model = FAMILIES[family](sizes, options.device, dtype)
    record: dict[str, Any] = {"family": family, "tokens": model.tokens, "guidance": model.guidance, "levels": []}
    print(f"{family}: {model.tokens} tokens, made in {time.perf_counter() - start:.1f} s", flush=True)
    for index, accuracy in enumerate(options.accuracy):
        noise, reached = model.calibrate(accuracy, CELLS[options.size], options.noise)
        print(f" accuracy {reached:.2f}, after {time.perf_counter() - start:.1f} s", flush=True)
        for level in compare(model, options.tree or TREES[model.model.device.type], options.repeats):
            record["levels"][index:] = [{"accuracy": reached, "noise": noise, **level}]
            yield record
        model.scale_noise(1 / noise)  # for the next search
    clear_cache()
    print(f" {time.perf_counter() - start:.1f} s in all", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=["janus"])
    parser.add_argument("--size", choices=CELLS, default="small")
    parser.add_argument("--side", type=int, help="codes per side; default: 16 (8 for the size test)")
    parser.add_argument("--accuracy", type=float, nargs="+", default=[0.8, 0.75], help="levels of accuracy")
    parser.add_argument("--noise", type=float, help="of an earlier result, instead of a search for the accuracy")
    parser.add_argument("--tree", nargs="+", help="trees to compare; default: none, a chain and auto")
    parser.add_argument("--repeats", type=int, default=3, help="timed images")
    parser.add_argument("--seconds", type=float, default=600.0, help="after this time, no further family is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> None:
    options, start = parse_options(), time.perf_counter()
    transformers.logging.set_verbosity_error()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # so that the time of the process is the time it takes, whatever else is running
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    record: dict[str, Any] = {
        "kind": "custom-generate", "size": options.size, "dtype": dtype, "transformers": transformers.__version__,
        "machine": describe_machine(device), "models": [],
    }  # fmt: skip
    for index, family in enumerate(options.family):
        if time.perf_counter() - start > options.seconds:
            print(f"{family}: no time was left", flush=True)
            continue
        try:
            for result in measure_family(family, options, getattr(torch, dtype)):
                record["models"][index:] = [result]
                if options.out is not None:
                    options.out.write_text(json.dumps(record, indent=1) + "\n")
        except Exception:  # the other families are measured all the same
            traceback.print_exc()
            record["failed"] = True
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    raise SystemExit("failed" in record)


if __name__ == "__main__":
    main()
