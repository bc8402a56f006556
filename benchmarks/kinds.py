"""Speed by kind of picture: `python benchmarks/kinds.py [--limit N]` measures it and writes the table of the README.

Every prompt of benchmarks/prompts_kinds.json is drawn by plain decoding and with the model's defaults, in turns, with
the same seed. Needs an idle machine: with all 40 prompts about ten minutes on two cores. The measurements go to
benchmarks/results/kinds/DEVICE.json; `--render FILE` writes the table of such a file without measuring.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from underdraw import Pipeline
from underdraw.bench.environment import describe_machine
from underdraw.io import atomic_write_json
from underdraw.registry import policies

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "benchmarks" / "prompts_kinds.json"
BLOCK = re.compile(r"(<!-- kinds -->\n).*?(<!-- /kinds -->)", re.S)
LABELS = {
    "plain": "sprite on a plain background",
    "gradient": "sprite on a gradient",
    "scene": "sprite in a landscape",
    "portrait": "portrait",
    "photo": "photo",
}


def measure(pipe: Pipeline, prompts: Mapping[str, Sequence[str]], temperature: float | None) -> list[dict[str, Any]]:
    """One row per prompt: seconds of plain decoding and of the defaults, passes, and whether the pixels are equal."""
    plain, rows = pipe.plain(), []
    for each in (plain, pipe):
        each.set_progress_bar_config(disable=True)
        each(next(iter(prompts.values()))[0], seed=0, temperature=temperature)  # warm-up, not counted
    images = [(kind, index, prompt) for kind, texts in prompts.items() for index, prompt in enumerate(texts)]
    for kind, seed, prompt in (bar := tqdm(images, unit="prompt")):
        bar.set_description(kind)
        slow, fast = (each(prompt, seed=seed, temperature=temperature) for each in (plain, pipe))
        rows.append(
            {
                "kind": kind,
                "prompt": prompt,
                "seed": seed,
                "plain_seconds": round(slow.stats.seconds, 4),
                "seconds": round(fast.stats.seconds, 4),
                "tokens": fast.stats.tokens,
                "passes": fast.stats.passes,
                "is_identical": slow.images[0].tobytes() == fast.images[0].tobytes(),
            }
        )
    return rows


def table_row(label: str, rows: Sequence[Mapping[str, Any]]) -> str:
    speedups = [row["plain_seconds"] / row["seconds"] for row in rows]
    p10, median, p90 = np.percentile(speedups, [10, 50, 90])
    tokens_per_pass = sum(row["tokens"] for row in rows) / sum(row["passes"] for row in rows)
    identical = sum(row["is_identical"] for row in rows)
    return (
        f"| {label} | {tokens_per_pass:.1f} | **{median:.2f}x** | {p10:.2f} to {p90:.2f} | {identical} of {len(rows)} |"
    )


def render(record: Mapping[str, Any]) -> str:
    """The table of a result, with what it was measured on."""
    machine, settings, rows = record["machine"], record["settings"], record["rows"]
    is_cpu, commit = machine["cuda"] is None, (machine["commit"] or "unknown")[:12]
    hardware = f"{machine['processor']}, {machine['threads']} threads" if is_cpu else machine["device"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [
        f"Model `{record['model']}`, drafter `{settings['drafter']}` with tree `{record['tree']}`, against plain "
        f"decoding. {hardware}, {settings['dtype']}, torch {machine['torch']}, commit {commit}; "
        f"temperature {settings['temperature']:g}, guidance {settings['guidance']:g}, {len(rows)} prompts.",
        "",
        "| kind of picture | tokens per pass (mean) | speed-up, median | p10 to p90 | identical pixels |",
        "|---|---|---|---|---|",
        *(table_row(LABELS.get(kind, kind), [row for row in rows if row["kind"] == kind]) for kind in kinds),
        table_row("all", rows),
    ]
    return "\n".join(lines)


def write_block(page: Path, record: Mapping[str, Any]) -> None:
    """Replace the table between the marks of a page."""
    text, count = BLOCK.subn(lambda match: f"{match[1]}{render(record)}\n{match[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{page} must have one block from <!-- kinds --> to <!-- /kinds -->, and has {count}.")
    page.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, help="default: the model's")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of every kind")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="JSON", help="prompts by kind")
    parser.add_argument("--out", type=Path, metavar="JSON", help="default: benchmarks/results/kinds/DEVICE.json")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md", help="page with the table")
    parser.add_argument("--render", type=Path, metavar="JSON", help="write the table of this result, measure nothing")
    arguments = parser.parse_args()
    if arguments.render is not None:
        write_block(arguments.page, json.loads(arguments.render.read_text()))
        return
    prompts = {kind: texts[: arguments.limit] for kind, texts in json.loads(arguments.prompts.read_text()).items()}
    pipe = Pipeline.from_pretrained(arguments.model, device=arguments.device, dtype=arguments.dtype)
    rows = measure(pipe, prompts, arguments.temperature)
    record = {
        "kind": "kinds",
        "model": Path(arguments.model).name if Path(arguments.model).exists() else pipe.model.name,
        "tree": policies.describe(pipe.tree),
        "settings": pipe.settings(pipe.request(rows[0]["prompt"], seed=0, temperature=arguments.temperature)),
        "machine": describe_machine(pipe.device),
        "rows": rows,
    }
    out = arguments.out or ROOT / "benchmarks" / "results" / "kinds" / f"{pipe.device.type}.json"
    atomic_write_json(out, record)
    write_block(arguments.page, record)
    print(render(record))


if __name__ == "__main__":
    main()
