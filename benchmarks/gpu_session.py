"""All GPU measurements of docs by one command, each in a process of its own with a time limit.

    python benchmarks/gpu_session.py OUT                          # on a GPU; about an hour
    python benchmarks/gpu_session.py OUT --only tests engine      # some of them
    python benchmarks/gpu_session.py OUT --only agreement --seconds 300
    python benchmarks/gpu_session.py OUT --tiny                   # small models, to try it; minutes on a CPU
    cp -r OUT/results/. benchmarks/results && underdraw plot --page docs   # the pages

OUT/results has the files that are committed below benchmarks/results, OUT/traces those of benchmarks/traces, and
OUT/logs what every command printed. A command that fails or hangs does not affect the others; its exit code is in
OUT/session.json. Some of them (agreement, kinds, sweep) go on where they stopped if the same OUT is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks"
RESULTS = SCRIPTS / "results"
KINDS, PROMPTS = SCRIPTS / "prompts_kinds.json", SCRIPTS / "prompts64.txt"


class Command(NamedTuple):
    """A command line after `python`, and the seconds that it may take."""

    name: str
    limit: float
    words: tuple[str, ...]


def command(name: str, limit: float, *words: object) -> Command:
    return Command(name, limit, tuple(map(str, words)))


def tests(out: Path, tiny: bool) -> Iterator[Command]:
    chosen = ["tests/exactness/test_graphs.py", "-k", "bucket"] if tiny else ["tests/gpu"]
    yield command("tests", 600, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", *chosen)


def engine(out: Path, tiny: bool) -> Iterator[Command]:
    """Times of passes by size, profiles, the bandwidth bound and transformers (docs/performance.md)."""
    folder = out / "results" / "engine"
    variants = [
        ("anole-7b", "--weights", "full"),
        ("anole-7b", "--weights", "int8"),
        ("llamagen-xl", "--weights", "full"),
        ("anole-7b", "--weights", "fp8"),
        ("anole-7b", "--weights", "int4"),
        ("anole-7b", "--numerics", "fastest"),
    ]
    for model, option, value in variants[: 2 if tiny else None]:
        is_full = value == "full"
        name = model if is_full else f"{model}-{value}"
        words = ["--model", "random:toy" if tiny else f"random:{model}", option, value, "--force"]
        words += [] if is_full and model == "anole-7b" else ["--no-transformers"]
        words += ["--passes", "2"] if tiny else []
        yield command(
            f"engine-{name}", 200, "-m", "underdraw", "bench", "engine", *words, "-o", folder / f"{name}.json"
        )


def agreement(out: Path, tiny: bool) -> Iterator[Command]:
    """Tokens of plain decoding against chains and trees (docs/exactness.md); resumes, so it may be given many times."""
    folder, toy = out / "results" / "agreement", ["--toy"] if tiny else []
    yield command(
        "agreement", 900, SCRIPTS / "agreement_matrix.py", folder, "--seconds", 30 if tiny else "{limit}", *toy
    )
    model = ["--model", "random:toy" if tiny else "random:anole-7b", "--numerics", "fastest"]
    sizes = ["--nodes", 24, "--nodes", 64, "--batch", 1, "--batch", 3, "--temperature", 1, "--pictures", 6]
    words = [*model, *sizes, "--tokens", 48, "-o", folder / "anole-7b-fastest.json", "--force"]
    yield command("agreement-fastest", 120, "-m", "underdraw", "bench", "agreement", *words)


def weights(out: Path, tiny: bool) -> Iterator[Command]:
    """What quantised weights change (docs/weights.md)."""
    few = ["--limit", 2, "--pictures", 1, "--formats", "int8"] if tiny else []
    file = out / "results" / "weights" / "quality.json"
    yield command("weights", 240, SCRIPTS / "weights_quality.py", file, *few)


def trees(out: Path, tiny: bool) -> Iterator[Command]:
    """Tokens per pass of Jacobi trees (docs/row-above.md) and their replay at 7B (docs/experiments/kinds.md)."""
    few = ["--per-kind", 1, "--temperature", 1] if tiny else ["--batch", 40]
    one = ["--setting", "jacobi-tree trunk:nodes=64"] if tiny else []
    sweep = out / "results" / "sweep" / "h200.json"
    device = ["--device", "cpu"] if tiny else ["--device", "cuda"]
    yield command("sweep", 200, SCRIPTS / "jacobi_trees.py", *device, "--dtype", "auto", *few, *one, "--json", sweep)
    replay, costs, traces = SCRIPTS / "replay_kinds.py", out / "costs.json", out / "traces" / "kinds.npz"
    model = ["--model", "toy"] if tiny else []
    sizes = ["--sizes", 1, 8] if tiny else []
    yield command("replay-costs", 90, replay, "costs", costs, *model, *sizes)
    recorded = ["--per-kind", 1, "--setting", "chain 64"] if tiny else ["--batch", 40]
    yield command("replay-record", 200, replay, "record", traces, "--costs", costs, *device, *recorded)
    file = out / "results" / "replay" / "kinds.json"
    words = ["--costs", costs, "--out", file, "--seconds", 30 if tiny else 230]
    yield command("replay", 240, replay, "replay", traces, *words, *model)


def kinds(out: Path, tiny: bool) -> Iterator[Command]:
    """All methods by kind of picture (README.md, docs/experiments/kinds.md) and acceptance maps (docs/row-above.md)."""
    folder = out / "results" / "kinds" / "h200"
    words = ["--preset", "kinds", "--prompts", KINDS, "--temperature", 1, *(["--limit", 1] if tiny else [])]
    yield command("kinds", 420, "-m", "underdraw", "bench", *words, "--out", folder)
    files = ["--out", out / "row-above.png", "--json", out / "results" / "row-above.json"]
    yield command("acceptance-maps", 60, SCRIPTS / "acceptance_maps.py", folder, *files)


def batching(out: Path, tiny: bool) -> Iterator[Command]:
    """Continuous against static batches (docs/serving.md)."""
    script, traces, folder = SCRIPTS / "batching.py", out / "traces" / "windows.npz", out / "results" / "batching"
    device = [] if tiny else ["--device", "cuda", "--dtype", "bfloat16"]
    few = ["--concurrency", 1, 2, "--static", 2] if tiny else []
    yield command("batching-record", 90, script, *device, "--record", traces, *(["--prompts", 1] if tiny else []))
    time_limit = ["--seconds", 20] if tiny else ["--seconds", "{limit}"]
    words = [*device, "--images", 1 if tiny else 4, *time_limit, *few]
    yield command("batching-tiny", 150, script, *words, "-o", folder / "tiny-h200.json")
    random = ["--model", "random:toy" if tiny else "random:anole-7b", "--rows", 6, "--traces", traces]
    words = [*random, *device, "--images", 1 if tiny else 2, *time_limit, *few]
    yield command("batching-anole", 200, script, *words, "-o", folder / "anole-h200.json")


def families(out: Path, tiny: bool) -> Iterator[Command]:
    """Decoders of all families (docs/models.md) and `custom_generate` (docs/integrations.md)."""
    folder = out / "results" / "families"
    only = ["--only", "toy", "--passes", 2] if tiny else []
    yield command("families", 150, SCRIPTS / "families.py", *only, "--out", folder / "families.json")
    script = SCRIPTS / "custom_generate.py"
    size = ["--size", "test"] if tiny else ["--size", "published", "--side", 12]
    names = ["janus"] if tiny else ["janus", "glm_image", "chameleon", "emu3"]
    common = [*size, "--accuracy", 0.75, "--tree", "none", "auto"]
    words = ["--family", *names, *common, "--seconds", 200, "--out", folder / "custom-generate-gpu.json"]
    yield command("custom-generate", 260, script, *words)


def fullsize(out: Path, tiny: bool) -> Iterator[Command]:
    """Whole checkpoints in their published sizes and layouts (docs/models.md)."""
    few = ["--tiny", "--only", "simplear", "--device", "cpu"] if tiny else ["--once", "lumina,emu3", "--seconds", 400]
    yield command(
        "fullsize", 420, SCRIPTS / "fullsize.py", *few, "--out", out / "results" / "fullsize" / "fullsize.json"
    )


PARTS = {
    part.__name__: part for part in (tests, engine, agreement, weights, trees, kinds, batching, families, fullsize)
}


def run(step: Command, out: Path, limit: float) -> dict[str, object]:
    """Run a command; its output goes to a log file, of which the last lines are printed."""
    log = out / "logs" / f"{step.name}.log"
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    words = [sys.executable, *(word.format(limit=int(limit - 5)) if word == "{limit}" else word for word in step.words)]
    start = time.perf_counter()
    with log.open("w") as file:
        try:
            code = subprocess.run(
                words, env=environment, cwd=ROOT, timeout=limit, check=False, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    seconds = time.perf_counter() - start
    print(f"== {step.name}: exit code {code}, {seconds:.0f} s", flush=True)
    print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
    return {"name": step.name, "code": code, "seconds": round(seconds, 1)}


def prepare(out: Path) -> None:
    """Create the folders, and copy the result that keeps the rows of models that are not measured again."""
    for folder in ("engine", "agreement", "weights", "sweep", "replay", "kinds", "batching", "families", "fullsize"):
        (out / "results" / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("logs", "traces"):
        (out / folder).mkdir(exist_ok=True)
    kept = Path("families", "families.json")
    if not (out / "results" / kept).exists():
        shutil.copyfile(RESULTS / kept, out / "results" / kept)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some of the parts, in order")
    parser.add_argument("--tiny", action="store_true", help="small models and few settings")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of the whole session")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    prepare(out)
    start, results = time.perf_counter(), []
    for step in (step for name in options.only for step in PARTS[name](out, options.tiny)):
        left = options.seconds - (time.perf_counter() - start)
        if left < 10:
            results.append({"name": step.name, "code": None, "seconds": 0.0})  # no time was left
            continue
        results.append(run(step, out, min(step.limit, left)))
        (out / "session.json").write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(result["code"] != 0 for result in results))


if __name__ == "__main__":
    main()
