"""Load and run models of their published sizes with random weights, from checkpoints in the published formats.

    python benchmarks/fullsize.py --out results.json --seconds 300   # all eight, on a GPU
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
from pathlib import Path
from typing import Any

import fullsize_checkpoints
import fullsize_newer
import torch
from fullsize_checkpoints import WORDS, Sizes

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = fullsize_checkpoints.PUBLISHED | fullsize_newer.PUBLISHED  # without the pixels of GLM-Image
TINY = fullsize_checkpoints.TINY | fullsize_newer.TINY
WRITERS = fullsize_checkpoints.WRITERS | fullsize_newer.WRITERS
MIN_SECONDS = 30  # no model takes less
MIN_FREE_BYTES = 24 * 10**9  # more than the largest model


def generate(
    folder: Path, side: int, options: argparse.Namespace, compile: str, plain_only: bool, limit: float | None
) -> dict[str, Any]:
    """Run `underdraw generate`: plain decoding only, or with a tree and then plain, with one load for both."""
    arguments = {
        "--model": str(folder),
        "--drafter": "jacobi",
        "--tree": "none" if plain_only else options.tree,
        "--seed": "1",
        "--height": str(side),
        "--width": str(side),
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
            result["drawn"] = generate(
                folder, sizes.side, options, options.compile, name in options.once.split(","), remaining()
            )
        except RuntimeError as error:
            if options.compile == "off":
                raise
            print(f"{name}: {error}; trying again eagerly", flush=True)
            result |= {"failed": str(error), "drawn": generate(folder, sizes.side, options, "off", True, remaining())}
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
    parser.add_argument(
        "--once", default="emu3,lumina2", help="comma-separated models that only decode plainly: large ones"
    )
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
