"""Everything that needs a GPU, in one command of less than ten minutes: the engine, its variants, agreement, tests.

    python benchmarks/gpu_session.py OUT                 # on a GPU: OUT gets a log, JSON files and a page
    python benchmarks/gpu_session.py OUT --tiny          # the same steps with a toy model; a minute on a CPU

Each step runs in a process of its own with a time limit, and what it has measured is on disk after every part, so one
step that fails or hangs costs itself alone. Needs torch and, for a baseline, transformers; pytest if it is there.
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
    """One step, its output in a file and on the screen's end."""
    log = out / f"{name}.log"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with log.open("w") as file:
        try:
            code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
                                  timeout=limit, check=False).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 124
    seconds = time.perf_counter() - began
    print(f"== {name}: code {code}, {seconds:.0f} s", flush=True)
    print("\n".join(log.read_text(errors="replace").splitlines()[-40:]), flush=True)
    return {"name": name, "code": code, "seconds": round(seconds, 1)}


def tests(out: Path, tiny: bool) -> list[str]:
    if importlib.util.find_spec("pytest") is None:
        return [sys.executable, str(Path(__file__).resolve()), str(out), "--step", "checks"]
    chosen = ["tests/exactness/test_graphs.py", "-k", "bucket"] if tiny else ["tests/gpu"]
    return [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "--maxfail=5", *chosen]


def checks() -> None:
    """What tests/gpu checks first, for machines without pytest."""
    import graph_checks
    import torch
    import toy_models

    from underdraw.engine.cuda_graphs import CudaGraphPass, EagerPass, GraphCache

    device = "cuda" if torch.cuda.is_available() else "cpu"
    of, record = toy_models.target(device=device), CudaGraphPass if device == "cuda" else EagerPass
    for name in graph_checks.DRAFTERS:
        for batch, seeds in graph_checks.BATCHES.items():
            for layout, own in graph_checks.LAYOUTS.items():
                for policy in graph_checks.POLICIES:
                    graphs = GraphCache(capture=record, span_multiple=64)
                    graph_checks.check_two_decodes(of, graphs, name, policy, layout=own, seeds=seeds, guidance=2.0)
                print(f"{name}, {batch}, {layout}: equal", flush=True)


def engine(name: str, model: str, out: Path, kind: str) -> None:
    """`underdraw bench engine` without its command line, which needs packages that may be missing.

    `full` measures everything, `short` plain pictures and trees of 64 nodes, `tuned` the same with tuned products.
    """
    import torch

    from underdraw.bench.engine import EngineBenchConfig, measure
    from underdraw.bench.records import engine_rows
    from underdraw.bench.replay import Trace
    from underdraw.models.loading import resolve_placement

    place, full = resolve_placement("auto", "auto"), kind == "full"
    cuda = place.device.type == "cuda"
    levels: Any = ("eagle", "block") if full else ()
    settings = EngineBenchConfig(
        model, place, compile="on" if cuda else "off", passes=40 if cuda else 2, pictures=3 if cuda else 1,
        sizes=(1, 8, 16, 32, 64, 128) if full else (1, 64), drafters=levels, tuned=kind == "tuned",
        attention_backend="auto" if full or not cuda else "tree",
    )  # fmt: skip
    # A trace is replayed with the kind of drafter that its name begins with.
    traces: Any = [(Trace.load(path), path.stem.partition("-")[0]) for path in sorted(TRACES.glob("*.json")) if full]
    began = time.perf_counter()

    def tell(text: str) -> None:
        held = f", {torch.cuda.memory_allocated() / 2**30:.1f} GiB" if cuda else ""
        print(f"{time.perf_counter() - began:6.1f} s{held}: {text}", flush=True)

    def save(record: dict[str, Any]) -> None:
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

    record = measure(settings, traces, tell, baseline=full, save=save)
    for what, value in engine_rows(record):
        print(f"{what:60} {value}", flush=True)


def agree(out: Path, tiny: bool) -> None:
    """Plain and tree passes of the embedded model in bfloat16, as far as the device has it."""
    from underdraw import Pipeline
    from underdraw.bench.agreement import measure_agreement
    from underdraw.bench.environment import describe_machine
    from underdraw.engine.cuda_graphs import EagerPass, GraphCache, make_graph_cache

    pipe = Pipeline.from_pretrained("tiny", drafter="jacobi", dtype="bfloat16")
    graphs = make_graph_cache(pipe.device, "auto") or GraphCache(capture=EagerPass)
    count = 1 if tiny else 20
    texts = PROMPTS.read_text(encoding="utf-8").splitlines()[:count]
    job = pipe.request(texts)
    prompts = [pipe.model.make_prompt(text, None, job.size) for text in texts]
    found = measure_agreement(
        pipe.model.target, pipe.model.make_layout(job.size), prompts, job.guidance, graphs.with_min_bucket,
        temperature=job.temperature, top_k=job.top_k,
    )  # fmt: skip
    record = {
        "model": "tiny",
        "dtype": "bfloat16",
        "machine": describe_machine(pipe.device),
        "guidance": job.guidance,
        **found,
    }
    (out / "agreement.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found["shapes"], indent=1), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a toy model in the place of the large ones")
    parser.add_argument("--only", default="", help=f"steps, with commas between: {', '.join(LIMITS)}")
    parser.add_argument("--seconds", type=float, default=560, help="for everything; a step gets what is left")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.step == "checks":
        return checks()
    if given.step == "agreement":
        return agree(given.out, given.tiny)
    if given.step is not None:
        return engine(*given.step.split(":")[:2], given.out, given.step.split(":")[2])
    own = [sys.executable, str(Path(__file__).resolve()), str(given.out), *["--tiny"] * given.tiny, "--step"]
    large, medium = ("toy", "toy") if given.tiny else ("anole-7b", "llamagen-xl")
    steps = {
        "anole-7b": [*own, f"anole-7b:{large}:full"],
        "llamagen-xl": [*own, f"llamagen-xl:{medium}:short"],
        "agreement": [*own, "agreement"],
        "tests": tests(given.out, given.tiny),
        "tuned": [*own, f"tuned:{large}:tuned"],
    }
    unknown = {name for name in given.only.split(",") if name} - set(steps)
    if unknown:
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; known are {', '.join(steps)}")
    began, results = time.perf_counter(), []
    for name in [name for name in steps if not given.only or name in given.only.split(",")]:
        left = given.seconds - (time.perf_counter() - began)
        results.append(run(name, steps[name], given.out, max(1.0, min(LIMITS[name], left))))
        (given.out / "session.json").write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(result["code"] for result in results))


if __name__ == "__main__":
    main()
