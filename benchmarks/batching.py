"""Images per second and latency of continuous batching: `python benchmarks/batching.py --model tiny -o FILE.json`.

Rows of plain and of speculative decoding, in one run. First, as many requests as the most clients, all sent at once: in
static batches (whose images wait for the slowest one of their batch), in one static batch, and by continuous batching
with as many slots and with those of a static batch. Then clients that ask for an image, wait for it and ask for the
next, `--images` times each. The prompts are of all kinds of benchmarks/prompts_kinds.json, so images take
different numbers of passes. Every row is preceded by a round that is not timed, which captures its passes. Where time
is short, clients ask for fewer images; a row never ends in the middle of one.

`--model random:anole-7b` has random weights, and images are cut to `--rows` rows of cells: accepted lengths of recorded
images are replayed, and the result is a time and no picture. `--record FILE` records them with a real model.
`--render FILE ...` writes the tables of result files to docs/serving.md without measuring.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from batching_replay import PREFIX, random_pipeline, record

from underdraw import Pipeline
from underdraw.bench.environment import describe_machine
from underdraw.engine.scheduler import Scheduler
from underdraw.engine.slot_batch import bucket_slots
from underdraw.history import History
from underdraw.io import atomic_write_json
from underdraw.models.loading import resolve_placement
from underdraw.protocols import TreePolicy

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "serving.md"
TRACES = ROOT / "traces" / "windows.npz"
BLOCK = re.compile(r"(<!-- batching -->\n).*?(<!-- /batching -->)", re.S)
PLAIN_SHARE = 0.4  # of the time; drafts need more, since passes of every window are measured and captured
Row = dict[str, Any]


def mixed_prompts() -> list[str]:
    """All kinds in turns."""
    kinds = json.loads((ROOT / "prompts_kinds.json").read_text(encoding="utf-8"))
    return [text for group in zip(*kinds.values(), strict=False) for text in group]


def summary(latencies: Sequence[float], seconds: float, histories: Sequence[History]) -> Row:
    """Throughput and latency of some images."""
    tokens = sum(int((history.pass_index >= 0).sum()) for history in histories)
    p50, p95 = np.percentile(latencies, [50, 95])
    return {
        "images": len(latencies),
        "seconds": round(seconds, 3),
        "images_per_second": round(len(latencies) / seconds, 4),
        "latency_p50": round(float(p50), 4),
        "latency_p95": round(float(p95), 4),
        "tokens_per_pass": round(tokens / max(1, sum(history.passes for history in histories)), 3),
    }


def run_continuous(
    pipe: Pipeline, scheduler: Scheduler, clients: int, images: int, ask_until: float = float("inf")
) -> Row:
    """Clients in a closed loop until `images` are drawn; after `ask_until` they ask for no more than one each."""
    prompts, started, asked = mixed_prompts(), time.perf_counter(), 0
    done, passes, pass_seconds, step_seconds, live = [], 0, 0.0, 0.0, 0
    while asked < images or scheduler.has_work:
        if asked >= clients and time.perf_counter() > ask_until:
            images = asked
        while asked < images and scheduler.running + scheduler.waiting < clients:
            scheduler.add(pipe.request(prompts[asked % len(prompts)], seed=asked, top_p=1.0))
            asked += 1
        before = time.perf_counter()
        step = scheduler.step()
        step_seconds += time.perf_counter() - before
        if step.results:
            passes, live = passes + 1, live + len(step.results)
            pass_seconds += step.results[0][1].seconds
        for image in step.finished:
            if image.error is not None:
                raise RuntimeError("an image failed") from image.error
        done += step.finished
    seconds = time.perf_counter() - started
    latencies = [image.queued_seconds + image.run_seconds for image in done]
    slots = bucket_slots(min(clients, scheduler.slots), scheduler.slots, is_captured=pipe.graphs is not None)
    return {
        **summary(latencies, seconds, [image.history for image in done]),
        "passes": passes,
        "live_slots": round(live / max(passes, 1), 2),
        "pass_ms": round(1000 * pass_seconds / max(passes, 1), 3),
        "host_ms_between_passes": round(1000 * (step_seconds - pass_seconds) / max(passes, 1), 3),
        "tree": describe_tree(pipe.tree_for_batch(slots)),
    }


def run_static(pipe: Pipeline, batch: int, images: int) -> Row:
    """All images asked for at once and drawn in batches, one after another."""
    prompts = mixed_prompts()
    texts = [prompts[i % len(prompts)] for i in range(images)]
    request = pipe.request(texts, seed=list(range(images)), top_p=1.0)
    name, pipe.tree, pipe.max_batch = pipe.tree_name, pipe.tree_for_batch(batch), batch
    started, latencies, histories = time.perf_counter(), [], []
    for first in range(0, images, batch):
        part = request.select(range(first, min(first + batch, images)))
        new = [History(pipe.model.make_layout(request.size)) for _ in part.prompts]
        for _ in pipe.stream(part, new):
            pass
        latencies += [time.perf_counter() - started] * len(new)
        histories += new
    seconds = time.perf_counter() - started
    row = {**summary(latencies, seconds, histories), "tree": describe_tree(pipe.tree)}
    pipe.tree = name
    return row


def describe_tree(policy: TreePolicy) -> str:
    """The policy's name with its size, which tells how many tokens a pass may guess."""
    sizes = {name: getattr(policy, name) for name in ("depth", "nodes") if hasattr(policy, name)}
    return " ".join([type(policy).__name__.lower(), *(f"{name}={size}" for name, size in sizes.items())])


def measure(pipe: Pipeline, args: argparse.Namespace, report: Callable[[list[Row]], None]) -> None:
    """Rows of all methods; `report` gets the rows so far."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append({"at": round(time.perf_counter() - args.started, 1), **row})
        print(json.dumps(rows[-1]), flush=True)
        report(rows)

    methods = {"plain": pipe.plain(), "speculative": pipe}
    for method in args.methods:
        end = args.started + args.seconds * (PLAIN_SHARE if method != args.methods[-1] else 1.0)
        methods[method].set_progress_bar_config(disable=True)
        measure_method(methods[method], args, end, lambda row, method=method: add({"method": method, **row}))


def measure_method(pipe: Pipeline, args: argparse.Namespace, end: float, add: Callable[[Row], None]) -> None:
    """Rows of one method, the most important ones first; after `end` they are as short as possible."""
    slots, static = max(args.concurrency), args.static
    pipe.tree_for_batch = functools.cache(pipe.tree_for_batch)  # type: ignore[method-assign]  # measures once

    def add_static(batch: int) -> None:
        if args.warmup:
            run_static(pipe, batch, batch)
        row = {"batching": "static", "load": "at once", "slots": batch, "concurrency": slots}
        add({**row, **run_static(pipe, batch, slots)})
        if pipe.graphs is not None:
            pipe.graphs.runners.clear()

    add_static(static)
    scheduler = Scheduler(pipe, slots=slots)
    runs = [("at once", slots, slots, slots)]  # load, slots, clients, images
    fewer = [count for count in sorted(args.concurrency) if count < slots]
    runs += [("steady", slots, count, max(args.images * count, 4)) for count in fewer]
    runs += [("at once", static, slots, slots), ("steady", slots, slots, args.images * slots)]
    for index, (load, scheduler.slots, count, images) in enumerate(runs):
        if args.warmup:
            run_continuous(pipe, scheduler, count, count if scheduler.slots == slots else scheduler.slots)
        now = time.perf_counter()
        row = run_continuous(pipe, scheduler, count, images, now + (end - now) / (len(runs) - index + 1))
        add({"batching": "continuous", "load": load, "slots": scheduler.slots, "concurrency": count, **row})
    scheduler.close()
    if time.perf_counter() < end:
        add_static(slots)


def render(record: Mapping[str, Any]) -> str:
    """The table of a result, with what it was measured on."""
    machine, rows = record["machine"], sorted(record["rows"], key=_order)
    hardware = machine["processor"] if machine["cuda"] is None else machine["device"]
    replayed = ", accepted lengths replayed from recorded images" if record["replayed"] else ""
    static = {row["method"]: row for row in reversed(rows) if row["batching"] == "static"}  # the smallest batches
    lines = [
        f"Model `{record['model']}`, drafter `{record['drafter']}`, images of {record['tokens']} tokens{replayed}. "
        f"{hardware}, {record['dtype']}, {record['numerics']} numerics, torch {machine['torch']}, "
        f"commit {(machine['commit'] or 'unknown')[:12]}.",
        "",
        "| decoding | batching | requests | slots | clients | pictures | images/s | over static | latency p50 | p95 | "
        "tokens per pass |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        is_compared = row["concurrency"] == static[row["method"]]["concurrency"]
        ratio = row["images_per_second"] / static[row["method"]]["images_per_second"]
        lines.append(
            f"| {row['method']} | {row['batching']} | {row['load']} | {row['slots']} | {row['concurrency']} | "
            f"{row['images']} | {row['images_per_second']:.3g} | {f'{ratio:.2f}' if is_compared else ''} | "
            f"{row['latency_p50']:.2f} s | {row['latency_p95']:.2f} s | {row['tokens_per_pass']:.2f} |"
        )
    return "\n".join([*lines, "", *findings(rows, static)])


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Plain first, static first, requests at once first, then by clients and slots."""
    is_steady = row["load"] == "steady"
    return row["method"], row["batching"] != "static", is_steady, -row["concurrency"] * is_steady, row["slots"]


def findings(rows: Sequence[Mapping[str, Any]], static: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the rows say: continuous against static batches, and drafts against plain decoding."""
    continuous = {
        (row["load"], row["slots"], row["concurrency"], row["method"]): row
        for row in rows
        if row["batching"] == "continuous"
    }
    ratios = [
        f"{row['images_per_second'] / static[method]['images_per_second']:.2f} with {slots} slots ({method})"
        for (load, slots, _, method), row in continuous.items()
        if load == "at once" and method in static
    ]
    gains = []
    for (load, slots, clients, method), plain in continuous.items():
        drafted = continuous.get((load, slots, clients, "speculative"))
        if load == "steady" and method == "plain" and drafted is not None:
            speed, latency = (drafted[key] / plain[key] for key in ("images_per_second", "latency_p50"))
            gains.append(f"{clients}: {speed:.2f} and {latency:.2f}")
    first = next(iter(static.values()))
    return [
        f"- {first['concurrency']} requests at once, images/s over those of static batches of {first['slots']}: "
        f"{', '.join(ratios)}.",
        f"- Drafts over plain decoding, images/s and median latency by clients: {'; '.join(gains)}.",
    ]


def write_tables(page: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the block of a page by the tables of some results."""
    tables = "\n\n".join(map(render, records))
    text, count = BLOCK.subn(lambda match: f"{match[1]}{tables}\n{match[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{page} must have one block from <!-- batching --> to <!-- /batching -->, and has {count}.")
    page.write_text(text, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--tree", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--methods", nargs="+", default=["plain", "speculative"], choices=["plain", "speculative"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--static", type=int, default=16, help="images of a static batch")
    parser.add_argument("--images", type=int, default=1, help="images per client")
    parser.add_argument("--rows", type=int, default=4, help="rows of cells of an image of random weights")
    parser.set_defaults(started=time.perf_counter())
    parser.add_argument("--seconds", type=float, default=600, help="later rows have fewer images where time is short")
    parser.add_argument("--traces", type=Path, default=TRACES, help="recorded images for random weights")
    parser.add_argument("--record", type=Path, metavar="NPZ", help="record images of the model, and measure nothing")
    parser.add_argument("--prompts", type=int, default=20, help="images to record")
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--render", type=Path, nargs="+", metavar="JSON", help="write the tables of these results")
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.render:
        write_tables(args.page, [json.loads(path.read_text(encoding="utf-8")) for path in args.render])
        return None
    if args.model.startswith(PREFIX):
        drafter = "jacobi" if args.drafter == "auto" else args.drafter
        placement = resolve_placement(args.device, args.dtype)
        pipe = random_pipeline(args.model.removeprefix(PREFIX), placement, args.rows, drafter, args.traces)
        pipe.tree = args.tree
    else:
        pipe = Pipeline.from_pretrained(
            args.model, drafter=args.drafter, tree=args.tree, device=args.device, dtype=args.dtype
        )
    if args.record:
        return record(pipe, mixed_prompts()[: args.prompts], args.record)
    layout = pipe.model.make_layout(pipe.model.sizes[0])
    about = {
        "kind": "batching",
        "model": args.model,
        "drafter": pipe.drafter_name,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "numerics": pipe.numerics,
        "tokens": layout.cells,
        "replayed": args.model.startswith(PREFIX),
        "machine": describe_machine(pipe.device),
    }

    def report(rows: list[Row]) -> None:
        if args.out is not None:
            atomic_write_json(args.out, {**about, "rows": rows})

    measure(pipe, args, report)


if __name__ == "__main__":
    main()
