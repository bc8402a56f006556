"""Everything that needs a GPU, in one command of less than ten minutes: tests, engine, figures.

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
LIMITS = {"tests": 150, "anole-7b": 260, "llamagen-xl": 110, "kernel": 60}  # seconds; 580 in all


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
    print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)
    return {"name": name, "code": code, "seconds": round(seconds, 1)}


def tests(out: Path, tiny: bool) -> list[str]:
    if importlib.util.find_spec("pytest") is None:
        return [sys.executable, str(Path(__file__).resolve()), str(out), "--step", "checks"]
    chosen = ["tests/exactness/test_graphs.py", "-k", "bucket"] if tiny else ["tests/gpu"]
    return [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "--maxfail=5", *chosen]


def checks() -> None:
    """What tests/gpu checks first, for machines without pytest."""
    import captured
    import torch
    import toy

    from underdraw.engine.graphs import CudaGraph, Direct, Graphs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    of, record = toy.target(device=device), CudaGraph if device == "cuda" else Direct
    for name in captured.DRAFTERS:
        for batch, seeds in captured.BATCHES.items():
            for layout, own in captured.LAYOUTS.items():
                for policy in captured.POLICIES:
                    graphs = Graphs(record=record, quantum=64)
                    captured.check(of, graphs, name, policy, layout=own, seeds=seeds, guidance=2.0)
                print(f"{name}, {batch}, {layout}: equal", flush=True)


def engine(model: str, out: Path, *, full: bool, kernel: str) -> None:
    """`underdraw bench engine` without its command line, which needs packages that may be missing."""
    import torch

    from underdraw.evaluation.engine import Settings, measure
    from underdraw.evaluation.replay import Trace
    from underdraw.loading import placement

    place = placement("auto", "auto")
    cuda = place.device.type == "cuda"
    sizes: tuple[int, ...] = (1, 8, 16, 32, 64, 128) if full else (1, 64)
    levels: Any = ("eagle", "block") if full else ()
    attention: Any = kernel
    settings = Settings(
        model, place, compile="on" if cuda else "off", passes=40 if cuda else 4, sizes=sizes, drafters=levels,
        kernel=attention,
    )  # fmt: skip
    # A trace is replayed with the kind of drafter that its name begins with.
    traces: Any = [(Trace.load(path), path.stem.partition("-")[0]) for path in sorted(TRACES.glob("*.json")) if full]
    began = time.perf_counter()

    def tell(text: str) -> None:
        held = f", {torch.cuda.memory_allocated() / 2**30:.1f} GiB" if cuda else ""
        print(f"{time.perf_counter() - began:6.1f} s{held}: {text}", flush=True)

    def keep(record: dict[str, Any]) -> None:
        (out / f"{model}-{kernel}.json").write_text(json.dumps(record, indent=1) + "\n")

    record = measure(settings, traces, tell, baseline=full, keep=keep)
    from underdraw.evaluation.performance import rows

    for name, value in rows(record):
        print(f"{name:60} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a toy model in the place of the large ones")
    parser.add_argument("--only", default="", help="steps, with commas between: tests, anole-7b, llamagen-xl, kernel")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.step == "checks":
        return checks()
    if given.step is not None:
        model, kernel, full = given.step.split(":")
        return engine(model, given.out, full=full == "full", kernel=kernel)
    own = [sys.executable, str(Path(__file__).resolve()), str(given.out), "--step"]
    large, medium = ("toy", "toy") if given.tiny else ("anole-7b", "llamagen-xl")
    steps = {
        "tests": tests(given.out, given.tiny),
        "anole-7b": [*own, f"{large}:fused:full"],
        "llamagen-xl": [*own, f"{medium}:fused:short"],
        "kernel": [*own, f"{large}:products:short"],
    }
    chosen = [name for name in steps if not given.only or name in given.only.split(",")]
    results = [run(name, steps[name], given.out, LIMITS[name]) for name in chosen]
    (given.out / "session.json").write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(result["code"] for result in results))


if __name__ == "__main__":
    main()
