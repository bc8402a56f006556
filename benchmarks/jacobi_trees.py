"""Tokens per pass of Jacobi chains and Jacobi trees over prompts of five kinds.

    python benchmarks/jacobi_trees.py --per-kind 2
    python benchmarks/jacobi_trees.py --device cuda --dtype auto --batch 40 --json benchmarks/results/sweep/h200.json
    python benchmarks/jacobi_trees.py --setting "jacobi-tree trunk:nodes=64,init=left" --temperature 1

Tokens per pass of all prompts together are the harmonic mean, so that the figure is tokens over passes. Every setting
draws the images of plain decoding (`same` counts them): exactly in float32 on a CPU, up to rounding elsewhere.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw import Pipeline
from underdraw.bench.environment import describe_machine
from underdraw.history import History
from underdraw.io import atomic_write_json, read_json_object

PROMPTS = Path(__file__).parent / "prompts_kinds.json"
SETTINGS = (  # drafter and tree
    "jacobi:window=127 chain:depth=63",
    "jacobi-tree trunk:nodes=64,init=fixed",
    "jacobi-tree trunk:nodes=64",
    "jacobi-tree trunk:nodes=64,init=left",
    "jacobi-tree trunk:nodes=64,init=above-right",
    "jacobi-tree trunk:nodes=64,init=both",
    "jacobi-tree trunk:nodes=64,init=previous",
    "jacobi-tree trunk:nodes=64,init=random",
    "jacobi-tree trunk:nodes=64,rule=paper",
    "jacobi:window=127 chain:depth=31",
    "jacobi-tree trunk:nodes=32",
    "jacobi:window=127 chain:depth=127",
    "jacobi-tree trunk:nodes=128",
)


def decode(pipe: Pipeline, prompts: Sequence[str], temperature: float, batch: int) -> list[History]:
    """The histories of one image per prompt; the seed of an image is its index."""
    histories = []
    for start in range(0, len(prompts), batch):
        texts = list(prompts[start : start + batch])
        seeds = list(range(start, start + len(texts)))
        request = pipe.request(texts, temperature=temperature, top_p=1.0, seed=seeds)  # from all codes
        drawn = [History(pipe.model.make_layout(request.size)) for _ in texts]
        for _ in pipe.stream(request, drawn):
            pass
        histories += drawn
    return histories


def harmonic_mean(values: NDArray[np.float64]) -> float:
    return float(1 / (1 / values).mean())


def summarize(histories: Sequence[History], kinds: Sequence[str], plain: Sequence[History]) -> dict[str, float]:
    """Harmonic means of tokens per pass, over all images and by kind, and how many images equal plain decoding's."""
    rates = np.array([history.tokens_per_pass for history in histories])
    row = {"all": harmonic_mean(rates)}
    for kind in dict.fromkeys(kinds):
        row[kind] = harmonic_mean(rates[[name == kind for name in kinds]])
    row["nodes"] = float(np.mean([history.mean_nodes for history in histories]))
    row["trunk"] = float(np.mean([history.mean_depth for history in histories]))
    same = [np.array_equal(one.tokens, other.tokens) for one, other in zip(histories, plain, strict=False)]
    return {**row, "same": sum(same), "images": len(histories)}


def start_record(pipe: Pipeline, options: argparse.Namespace) -> dict[str, Any]:
    """The result that rows are added to: a new one, or the existing file's."""
    if options.json and options.json.exists():
        return read_json_object(options.json, "a sweep")
    dtype = str(pipe.model.placement.dtype).removeprefix("torch.")
    facts = {"dtype": dtype, "numerics": options.numerics, "machine": describe_machine(pipe.device)}
    return {"kind": "sweep", "model": pipe.model.name, **facts, "rows": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", default="auto", choices=["auto", "on", "capture", "off"])
    parser.add_argument("--numerics", default="row-invariant", choices=["row-invariant", "fastest"])
    parser.add_argument("--per-kind", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--setting", action="append", help="drafter and tree, separated by a space")
    parser.add_argument("--skip-plain", action="store_true", help="do not compare with plain decoding")
    parser.add_argument(
        "--json", type=Path, help="result to write after every setting; rows of an existing one are kept"
    )
    options = parser.parse_args()
    groups = {kind: texts[: options.per_kind] for kind, texts in json.loads(PROMPTS.read_text()).items()}
    prompts, kinds = [t for texts in groups.values() for t in texts], [k for k, texts in groups.items() for _ in texts]
    pipe = Pipeline.from_pretrained(
        options.model,
        device=options.device,
        dtype=options.dtype,
        compile=options.compile,
        numerics=options.numerics,
        tree="none",
    )
    pipe.set_progress_bar_config(disable=True)
    result = start_record(pipe, options)
    for temperature in options.temperature or (1.0, 0.5):
        plain = [] if options.skip_plain else decode(pipe.plain(), prompts, temperature, options.batch)
        for setting in options.setting or SETTINGS:
            pipe.drafter, pipe.tree = setting.split()
            started = time.perf_counter()
            row = summarize(decode(pipe, prompts, temperature, options.batch), kinds, plain)
            seconds = time.perf_counter() - started
            figures = "  ".join(f"{name} {value:.2f}" for name, value in row.items())
            print(f"T={temperature} {setting:48s} {figures}  {seconds:.1f} s", flush=True)
            result["rows"].append({"temperature": temperature, "setting": setting, **row})
            if options.json:
                atomic_write_json(options.json, result)


if __name__ == "__main__":
    main()
