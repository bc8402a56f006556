"""Measures the targets of the embedded model: `python -m recipes.tiny.targets --out FOLDER`.

Runs the preset `targets` of `underdraw bench` (plain sampling, the default tree and four others in turns) and then
`underdraw generate`, from the start of a process to the saved image. Needs an idle machine. The same command continues
an interrupted run. Missed targets are reported; they are not an error.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from underdraw.bench.presets import DEFAULT, PLAIN
from underdraw.bench.records import record_sections
from underdraw.bench.report import to_markdown
from underdraw.bench.sections import portable_settings
from underdraw.bench.summary import read_summary
from underdraw.cli import options
from underdraw.cli.app import main
from underdraw.io import atomic_write_json
from underdraw.prompts import load_prompts

app = typer.Typer(add_completion=False)
RESULT = "targets.json"
TOKENS, SPEED = {1.0: 3.5, 0.0: 6.0}, {1.0: 1.5, 0.0: 2.5}  # by temperature
SECONDS = 15.0  # from the prompt to the saved image


def checks(summary: dict[str, Any], seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Every target with what was measured. `seconds` are those of the command line."""
    records: list[dict[str, Any]] = []

    def check(temperature: str, what: str, wanted: str, measured: str, reached: bool) -> None:
        texts = {"temperature": temperature, "what": what, "wanted": wanted, "measured": measured}
        records.append({**texts, "reached": bool(reached)})

    for entry in summary["entries"]:
        if entry["method"] != DEFAULT or entry["temperature"] not in TOKENS:
            continue
        temperature, speed = f"{entry['temperature']:g}", entry["speedup"]
        tokens, ratio = TOKENS[entry["temperature"]], SPEED[entry["temperature"]]
        tau = entry["tau"]
        check(temperature, "tokens a pass, default tree", f"{tokens:g}", f"{tau:.2f}", tau >= tokens)
        spread = f"{speed['median']:.2f} ({speed['p10']:.2f} to {speed['p90']:.2f})"
        check(
            temperature, "speed-up over plain AR, median (p10 to p90)", f"{ratio:g}", spread, speed["median"] >= ratio
        )
        check(temperature, "never slower than plain AR, p10", "1", f"{speed['p10']:.2f}", speed["p10"] >= 1)
    for entry in summary["entries"]:
        if entry["method"] != PLAIN:
            same, total = entry["equal_images"].split("/")
            what = f"identical pictures, {entry['method']}"
            check(f"{entry['temperature']:g}", what, total, same, same == total)
    if seconds:
        spread = f"{sorted(seconds)[len(seconds) // 2]:.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        what = "seconds from the prompt to the saved picture"
        check("default", what, f"{SECONDS:g}", spread, max(seconds) <= SECONDS)
    return records


def time_commands(prompts: Sequence[str], parts: Sequence[str]) -> list[float]:
    """Seconds of `underdraw generate` for each prompt, in a new process."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for index, text in enumerate(prompts):
            began = time.perf_counter()
            run_underdraw(["generate", text, "-o", f"{folder}/{index}.png", "--seed", str(index), "--quiet", *parts])
            seconds.append(round(time.perf_counter() - began, 3))
    return seconds


def run_underdraw(arguments: Sequence[str]) -> None:
    """Run a command in a new process; if it fails, exit with its code."""
    if code := subprocess.run([sys.executable, "-m", "underdraw", *arguments]).returncode:
        raise SystemExit(code)


@app.command()
def targets(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder of the run, with targets.json.")],
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="FILE", help="Text file with one prompt per line.")
    ] = "benchmarks/prompts64.txt",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of the benchmark.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="How often every image is generated, in turns.")] = 2,
    images: Annotated[int, typer.Option(min=0, help="How often the command line is timed.")] = 3,
    model: options.Model = "tiny",
    drafter: options.Drafter = "auto",
) -> None:
    """Measure the targets of the embedded model and print which are reached."""
    parts = ["--model", model, "--drafter", drafter]
    scope = ["--prompts", prompts, "--limit", str(limit), "--repeats", str(repeats)]
    run_underdraw(["bench", "--preset", "targets", *scope, *parts, "--out", str(out)])
    summary = read_summary(out)
    seconds = time_commands(load_prompts(prompts)[:images], parts)
    record = {
        "kind": "targets", "model": summary["settings"]["model"], "settings": portable_settings(summary["settings"]),
        "prompts": max(entry["prompts"] for entry in summary["entries"]), "repeats": repeats,
        "command_seconds": seconds, "checks": checks(summary, seconds), "machine": summary["machine"],
    }  # fmt: skip
    atomic_write_json(out / RESULT, record)
    print(f"\n{to_markdown(record_sections(record))}\n\n{out / RESULT}")


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.targets"))
