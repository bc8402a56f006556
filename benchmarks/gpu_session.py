"""All GPU measurements in one command of less than ten minutes: the engine, attention variants, agreement, tests.

    python benchmarks/gpu_session.py OUT                 # on a GPU: OUT gets logs and JSON files
    python benchmarks/gpu_session.py OUT --tiny          # the same steps with a toy model; a minute on a CPU

Each step runs in a separate process with a time limit and writes its results after every part, so a step that fails or
hangs does not affect the others. Needs torch; transformers for the baseline and pytest for the tests are optional.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "benchmarks" / "traces"
LIMITS = {"anole-7b": 270, "llamagen-xl": 100, "agreement": 80, "tests": 170, "tuned": 170}  # seconds at most
PROMPTS = ROOT / "benchmarks" / "prompts64.txt"


def run(name: str, words: list[str], out: Path, limit: float) -> dict[str, Any]:
    """Run one step; its output goes to a log file, of which the last lines are printed."""
    log = out / f"{name}.log"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    start = time.perf_counter()
    with log.open("w") as file:
        output: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
        try:
            code = subprocess.run(words, env=environment, cwd=ROOT, timeout=limit, check=False, **output).returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds = time.perf_counter() - start
    print(f"== {name}: code {code}, {seconds:.0f} s", flush=True)
    print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
    return {"name": name, "code": code, "seconds": round(seconds, 1)}


def test_command(out: Path, tiny: bool) -> list[str]:
    """The command of the GPU tests, or of `run_checks` where pytest is missing."""
    if importlib.util.find_spec("pytest") is None:
        return [sys.executable, str(Path(__file__).resolve()), str(out), "--step", "checks"]
    chosen = ["tests/exactness/test_graphs.py", "-k", "bucket"] if tiny else ["tests/gpu"]
    return [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "--maxfail=5", *chosen]


def run_checks() -> None:
    """The most important checks of tests/gpu, for machines without pytest."""
    import graph_checks
    import torch
    import toy_models

    from underdraw.engine.cuda_graphs import CudaGraphPass, EagerPass, GraphCache

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, capture = toy_models.target(device=device), CudaGraphPass if device == "cuda" else EagerPass
    for name in graph_checks.DRAFTERS:
        for batch, seeds in graph_checks.BATCHES.items():
            for layout_name, layout in graph_checks.LAYOUTS.items():
                for policy in graph_checks.POLICIES:
                    graphs = GraphCache(capture=capture, span_multiple=64)
                    options: dict[str, Any] = {"layout": layout, "seeds": seeds, "guidance": 2.0}
                    graph_checks.check_two_decodes(target, graphs, name, policy, **options)
                print(f"{name}, {batch}, {layout_name}: equal", flush=True)


def measure_engine(name: str, model: str, out: Path, kind: str) -> None:
    """`underdraw bench engine` without its command line, which needs packages that may be missing.

    `full` measures everything, `short` plain decoding and passes over 64 nodes, `tuned` the same with autotuned GEMMs.
    """
    import torch

    from underdraw.bench.engine import EngineBenchConfig, measure
    from underdraw.bench.records import engine_rows
    from underdraw.bench.replay import Trace
    from underdraw.models.loading import resolve_placement

    placement, is_full = resolve_placement("auto", "auto"), kind == "full"
    cuda = placement.device.type == "cuda"
    config = EngineBenchConfig(
        model,
        placement,
        compile="on" if cuda else "off",
        passes=40 if cuda else 2,
        pictures=3 if cuda else 1,
        sizes=(1, 8, 16, 32, 64, 128) if is_full else (1, 64),
        drafters=("eagle", "block") if is_full else (),
        tuned=kind == "tuned",
        attention_backend="auto" if is_full or not cuda else "tree",
    )
    # The name of a trace starts with the drafter that it is replayed with.
    paths = sorted(TRACES.glob("*.json")) if is_full else []
    traces: Any = [(Trace.load(path), path.stem.partition("-")[0]) for path in paths]
    start = time.perf_counter()

    def set_stage(text: str) -> None:
        memory = f", {torch.cuda.memory_allocated() / 2**30:.1f} GiB" if cuda else ""
        print(f"{time.perf_counter() - start:6.1f} s{memory}: {text}", flush=True)

    def save(record: dict[str, Any]) -> None:
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

    record = measure(config, traces, set_stage, baseline=is_full, save=save)
    for label, value in engine_rows(record):
        print(f"{label:60} {value}", flush=True)


def measure_tiny_agreement(out: Path, tiny: bool) -> None:
    """Agreement of plain and tree passes of the embedded model in bfloat16."""
    from underdraw import Pipeline
    from underdraw.bench.agreement import Subject, measure_agreement
    from underdraw.bench.environment import describe_machine
    from underdraw.engine.cuda_graphs import EagerPass, GraphCache, make_graph_cache

    pipe = Pipeline.from_pretrained("tiny", drafter="jacobi", dtype="bfloat16")
    graphs = make_graph_cache(pipe.device, "auto") or GraphCache(capture=EagerPass)
    count = 1 if tiny else 20
    texts = PROMPTS.read_text(encoding="utf-8").splitlines()[:count]
    request = pipe.request(texts)
    layout = pipe.model.make_layout(request.size)
    subject = Subject("tiny", pipe.model.target, layout, pipe.prompts(request), request.guidance, request.top_k)
    agreement = measure_agreement(subject, graphs.with_min_bucket, temperature=request.temperature)
    facts = {"model": "tiny", "dtype": "bfloat16", "machine": describe_machine(pipe.device)}
    record = {**facts, "guidance": request.guidance, **agreement}
    (out / "agreement.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(agreement["shapes"], indent=1), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a toy model instead of the large ones")
    parser.add_argument("--only", default="", help=f"comma-separated steps: {', '.join(LIMITS)}")
    parser.add_argument("--seconds", type=float, default=560, help="time limit of the whole session")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.step == "checks":
        return run_checks()
    if options.step == "agreement":
        return measure_tiny_agreement(options.out, options.tiny)
    if options.step is not None:
        return measure_engine(*options.step.split(":")[:2], options.out, options.step.split(":")[2])
    this = [sys.executable, str(Path(__file__).resolve()), str(options.out), *["--tiny"] * options.tiny, "--step"]
    large, medium = ("toy", "toy") if options.tiny else ("anole-7b", "llamagen-xl")
    steps = {
        "anole-7b": [*this, f"anole-7b:{large}:full"],
        "llamagen-xl": [*this, f"llamagen-xl:{medium}:short"],
        "agreement": [*this, "agreement"],
        "tests": test_command(options.out, options.tiny),
        "tuned": [*this, f"tuned:{large}:tuned"],
    }
    unknown = {name for name in options.only.split(",") if name} - set(steps)
    if unknown:
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; allowed: {', '.join(steps)}")
    start, results = time.perf_counter(), []
    for name in [name for name in steps if not options.only or name in options.only.split(",")]:
        left = options.seconds - (time.perf_counter() - start)
        results.append(run(name, steps[name], options.out, max(1.0, min(LIMITS[name], left))))
        (options.out / "session.json").write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(result["code"] for result in results))


if __name__ == "__main__":
    main()
