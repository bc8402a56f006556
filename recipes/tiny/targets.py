"""What the embedded model must reach, checked in one run: `python -m recipes.tiny.targets --out FOLDER`.

Runs the preset `targets` of `underdraw bench` (plain autoregression, the default tree and four others take turns
picture by picture) and then `underdraw generate`, from a new process to the saved picture. On a busy machine times mean
nothing. A run that was stopped goes on when the command is given again. It reports what was missed and does not fail.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from underdraw.bench.methods import PLAIN
from underdraw.bench.presets import DEFAULT
from underdraw.bench.records import head, table, told
from underdraw.bench.results import write_json
from underdraw.bench.summary import read_summary
from underdraw.prompts import load_prompts
from underdraw.training.command import run

RESULT = "targets.json"
TOKENS, SPEED = {1.0: 3.5, 0.0: 6.0}, {1.0: 1.5, 0.0: 2.5}  # by temperature
SECONDS = 15.0  # from the prompt to the saved picture


def checks(summary: dict[str, Any], seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Every target with what was measured. `seconds` are those of the command line."""
    found: list[dict[str, Any]] = []

    def check(temperature: str, what: str, wanted: str, measured: str, reached: bool) -> None:
        texts = {"temperature": temperature, "what": what, "wanted": wanted, "measured": measured}
        found.append({**texts, "reached": bool(reached)})

    for one in summary["entries"]:
        if one["method"] != DEFAULT or one["temperature"] not in TOKENS:
            continue
        where, speed = f"{one['temperature']:g}", one["speedup"]
        tokens, ratio = TOKENS[one["temperature"]], SPEED[one["temperature"]]
        check(where, "tokens a pass, default tree", f"{tokens:g}", f"{one['tau']:.2f}", one["tau"] >= tokens)
        spread = f"{speed['median']:.2f} ({speed['p10']:.2f} to {speed['p90']:.2f})"
        check(where, "speed-up over plain AR, median (p10 to p90)", f"{ratio:g}", spread, speed["median"] >= ratio)
        check(where, "never slower than plain AR, p10", "1", f"{speed['p10']:.2f}", speed["p10"] >= 1)
    for one in summary["entries"]:
        if one["method"] != PLAIN:
            same, total = one["equal_images"].split("/")
            what = f"identical pictures, {one['method']}"
            check(f"{one['temperature']:g}", what, total, same, same == total)
    if seconds:
        spread = f"{sorted(seconds)[len(seconds) // 2]:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        what = "seconds from the prompt to the saved picture"
        check("default", what, f"{SECONDS:g}", spread, max(seconds) <= SECONDS)
    return found


def first_pictures(prompts: Sequence[str], more: Sequence[str]) -> list[float]:
    """Seconds of `underdraw generate`, each in a process of its own, import included."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for place, text in enumerate(prompts):
            began = time.perf_counter()
            underdraw(["generate", text, "-o", f"{folder}/{place}.png", "--seed", str(place), "--quiet", *more])
            found.append(round(time.perf_counter() - began, 3))
    return found


def underdraw(words: Sequence[str]) -> None:
    """A command in a process of its own; if it fails it has said why."""
    if code := subprocess.run([sys.executable, "-m", "underdraw", *words]).returncode:
        raise SystemExit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the check."""
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny.targets", description=__doc__.split(":")[0])
    parser.add_argument("--prompts", default="benchmarks/prompts64.txt", help="text file, one prompt a line")
    parser.add_argument("--limit", type=int, default=8, help="prompts of the bench")
    parser.add_argument("--repeats", type=int, default=2, help="how often every picture is drawn, in turns")
    parser.add_argument("--pictures", type=int, default=3, help="how often the command line is timed")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafter", default="auto", help="auto (the model's own, or jacobi), jacobi, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; its targets.json is the result")
    options = parser.parse_args(arguments)
    parts = ["--model", options.model, "--drafter", options.drafter]
    which = ["--prompts", options.prompts, "--limit", str(options.limit), "--repeats", str(options.repeats)]
    underdraw(["bench", "--preset", "targets", *which, *parts, "--out", str(options.out)])
    summary = read_summary(options.out)
    seconds = first_pictures(load_prompts(options.prompts)[: options.pictures], parts)
    found = {
        "kind": "targets", "model": summary["settings"]["model"], "settings": told(summary["settings"]),
        "prompts": max(one["prompts"] for one in summary["entries"]), "repeats": options.repeats,
        "command_seconds": seconds, "checks": checks(summary, seconds), "machine": summary["machine"],
    }  # fmt: skip
    write_json(options.out / RESULT, found)
    print(f"\n{head(found)}\n\n{table(found)}\n\n{options.out / RESULT}")


if __name__ == "__main__":
    run(main)
