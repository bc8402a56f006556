"""Images per second and latency of continuous batching: `python benchmarks/batching.py --model tiny -o FILE.json`.

At every concurrency so many clients ask for an image, wait for it and ask for the next, `--images` times. The prompts
are of all kinds of benchmarks/prompts_kinds.json, so images take different numbers of passes. Plain and speculative
decoding; and, in the same run, one image for each of the most clients: in static batches, whose images wait for the
slowest one of their batch, and by continuous batching.

`--render FILE ...` writes the tables of result files to docs/serving.md without measuring.

`--model random:anole-7b` has random weights, which accept nothing: the accepted lengths of a recorded image are forced
on them, and images are cut to `--rows` rows of cells. Then the result is a time and no picture.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from underdraw import Pipeline
from underdraw.bench.environment import describe_machine
from underdraw.bench.replay import Trace
from underdraw.engine.scheduler import Scheduler
from underdraw.engine.slot_batch import bucket_slots
from underdraw.history import History
from underdraw.io import atomic_write_json
from underdraw.models.family import ImageSize, LoadedModel, Placement, SamplingDefaults
from underdraw.models.loading import resolve_placement
from underdraw.models.random_weights import model_shape, random_target
from underdraw.protocols import Prompt, TreePolicy
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.exact import match_all_nodes

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "serving.md"
BLOCK = re.compile(r"(<!-- batching -->\n).*?(<!-- /batching -->)", re.S)
PREFIX = "random:"
MAX_SLOTS = 64


@dataclass(frozen=True, slots=True)
class ReplayBySeed:
    """The verifier of random weights: accepts as many tokens as a trace says, from a place that the seed decides."""

    lengths: Tensor  # (P,)
    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        chosen = noise_window.sampler.layout.token_ids(noise_window.sample(logits, tree.depths + 1))  # (B, N)
        reach = noise_window.steps.shape[1]
        match_all_nodes(tree, reach, chosen)  # only for its time
        start = noise_window.steps[:, 0] + 37 * noise_window.sampler.seeds
        length = torch.minimum(self.lengths[start % len(self.lengths)], tree.depths.amax(1))  # (B,)
        node = (tree.depths == length[:, None]).int().argmax(1)
        ancestors = tree.ancestors.gather(1, node[:, None, None].expand(-1, 1, tree.size))  # (B, 1, N)
        index, level = (torch.arange(count, device=node.device) for count in (tree.size, reach))
        path = ((ancestors & (tree.depths[:, None] == level[:, None])) * index).amax(-1)  # (B, reach)
        return AcceptedPath(path, length, chosen.gather(1, node[:, None])[:, 0], chosen)


def random_pipeline(name: str, placement: Placement, rows: int, drafter: str) -> Pipeline:
    """A pipeline of random weights in a published shape. Prompts have as many tokens as the text has words."""
    shape = model_shape(name)
    layout = replace(shape.layout, height=min(rows, shape.layout.height))
    token = next(i for i in range(1, shape.arch.vocab) if i not in layout.codes)

    def make_prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        return Prompt((token,) * (8 + 2 * len(text.split())), (token,) * 2)

    class NoPixels:
        downsample, codebook = 1, torch.zeros(1, 1)

    model = LoadedModel(
        family="random",
        name=PREFIX + name,
        target=random_target(shape.arch, placement),
        image_tokenizer=NoPixels(),  # type: ignore[arg-type]
        defaults=SamplingDefaults(shape.guidance, top_k=shape.top_k, top_p=shape.top_p),
        sizes=(ImageSize(layout.height, layout.width),),
        make_layout=lambda size: layout,
        make_prompt=make_prompt,
    )
    trace = Trace.load(ROOT / "traces" / "jacobi-t1.json")
    verifier = ReplayBySeed(torch.tensor(trace.accepted, device=placement.device))
    return Pipeline(model, drafter=drafter, verifier=verifier)


def mixed_prompts() -> list[str]:
    """All kinds in turns."""
    kinds = json.loads((ROOT / "prompts_kinds.json").read_text(encoding="utf-8"))
    return [text for group in zip(*kinds.values(), strict=False) for text in group]


def summary(latencies: Sequence[float], seconds: float, histories: Sequence[History]) -> dict[str, Any]:
    """Throughput and latency of some images."""
    if not latencies:
        return {"error": "no image was finished in time"}
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
    pipe: Pipeline, scheduler: Scheduler, concurrency: int, images: int, deadline: float
) -> dict[str, Any]:
    """`concurrency` clients in a closed loop until `images` are drawn, or the time is up."""
    prompts, started, asked = mixed_prompts(), time.perf_counter(), 0
    done, passes, pass_seconds, step_seconds = [], 0, 0.0, 0.0
    while len(done) < images and time.perf_counter() < deadline:
        while asked < images and scheduler.running + scheduler.waiting < concurrency:
            scheduler.add(pipe.request(prompts[asked % len(prompts)], seed=asked))
            asked += 1
        before = time.perf_counter()
        step = scheduler.step()
        step_seconds += time.perf_counter() - before
        pass_seconds += step.results[0][1].seconds if step.results else 0.0
        passes += bool(step.results)
        done += [image for image in step.finished if image.status == "finished"]
        failed = [image for image in step.finished if image.status == "failed"]
        if failed:
            raise RuntimeError("an image failed") from failed[0].error
    seconds = time.perf_counter() - started
    latencies = [image.queued_seconds + image.run_seconds for image in done]
    result = summary(latencies, seconds, [image.history for image in done])
    scheduler.cancel([image for batch in (scheduler._running.values(),) for image in batch])
    scheduler.step()
    return {
        **result,
        "passes": passes,
        "pass_ms": round(1000 * pass_seconds / max(passes, 1), 3),
        "host_ms_between_passes": round(1000 * (step_seconds - pass_seconds) / max(passes, 1), 3),
        "tree": describe_tree(pipe.tree_for_batch(bucket_slots(concurrency, MAX_SLOTS, is_captured=True))),
        "complete": len(done) == images,
    }


def run_static(pipe: Pipeline, batch: int, images: int, deadline: float) -> dict[str, Any]:
    """All images asked for at once and drawn in batches, one after another."""
    prompts = mixed_prompts()
    request = pipe.request([prompts[i % len(prompts)] for i in range(images)], seed=list(range(images)))
    started, latencies, histories = time.perf_counter(), [], []
    for first in range(0, images, batch):
        if time.perf_counter() > deadline:
            break
        part = request.select(range(first, min(first + batch, images)))
        new = [History(pipe.model.make_layout(request.size)) for _ in part.prompts]
        for _ in pipe.stream(part, new):
            pass
        latencies += [time.perf_counter() - started] * len(new)
        histories += new
    seconds = time.perf_counter() - started
    return {**summary(latencies, seconds, histories), "tree": describe_tree(pipe.tree)}


def describe_tree(policy: TreePolicy) -> str:
    """The policy's name with its size, which tells how many tokens a pass may guess."""
    sizes = {name: getattr(policy, name) for name in ("depth", "nodes") if hasattr(policy, name)}
    return " ".join([type(policy).__name__.lower(), *(f"{name}={size}" for name, size in sizes.items())])


def measure(pipe: Pipeline, args: argparse.Namespace, report: Any) -> list[dict[str, Any]]:
    """Rows of all methods and concurrencies; `report` gets the rows so far."""
    rows: list[dict[str, Any]] = []
    deadline = time.perf_counter() + args.seconds

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        report(rows)

    most = max(args.concurrency)
    for method, each in (("plain", pipe.plain()), ("speculative", pipe)):
        if method not in args.methods:
            continue
        each.set_progress_bar_config(disable=True)
        tree, each.tree = each.tree_name, each.tree_for_batch(args.static)
        for timed in (False, True) if args.warmup else (True,):
            row = run_static(each, args.static, most if timed else args.static, deadline)
            if timed:
                add({"method": method, "batching": f"static {args.static}", "concurrency": most, **row})
        each.tree = tree
        if each.graphs is not None:
            each.graphs.runners.clear()
        scheduler = Scheduler(each, slots=min(most, MAX_SLOTS))
        if args.warmup:
            run_continuous(each, scheduler, most, most, deadline)
        runs = [(most, most)] if args.images > 1 else []
        runs += [(count, max(args.images * count, 4)) for count in sorted(args.concurrency, reverse=True)]
        for concurrency, images in runs:
            row = run_continuous(each, scheduler, concurrency, images, deadline)
            add({"method": method, "batching": "continuous", "concurrency": concurrency, **row})
        scheduler.close()
    return rows


def render(record: Mapping[str, Any]) -> str:
    """The table of a result, with what it was measured on."""
    machine, rows = record["machine"], [row for row in record["rows"] if row.get("complete", True)]
    hardware = machine["processor"] if machine["cuda"] is None else machine["device"]
    replayed = ", accepted lengths replayed from a trace" if record["replayed"] else ""
    static = {
        (row["method"], row["concurrency"]): row["images_per_second"] for row in rows if row["batching"] != "continuous"
    }
    lines = [
        f"Model `{record['model']}`, drafter `{record['drafter']}`, images of {record['tokens']} tokens{replayed}. "
        f"{hardware}, {record['dtype']}, {record['numerics']} numerics, torch {machine['torch']}, "
        f"commit {(machine['commit'] or 'unknown')[:12]}.",
        "",
        "| decoding | batching | clients | pictures | images/s | over static | latency p50 | p95 | tokens per pass |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        baseline = static.get((row["method"], row["concurrency"]))
        ratio = "" if baseline is None else f"{row['images_per_second'] / baseline:.2f}"
        lines.append(
            f"| {row['method']} | {row['batching']} | {row['concurrency']} | {row['images']} | "
            f"{row['images_per_second']:.3g} | {ratio} | {row['latency_p50']:.2f} s | {row['latency_p95']:.2f} s | "
            f"{row['tokens_per_pass']:.2f} |"
        )
    return "\n".join([*lines, "", *findings(rows)])


def findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows say: continuous against static batches, and drafts against plain decoding."""
    most = max(row["concurrency"] for row in rows)
    once = {  # one image for each of the most clients
        (row["method"], row["batching"] == "continuous"): row["images_per_second"]
        for row in rows
        if row["images"] == row["concurrency"] == most
    }
    ratios = [
        f"{once[method, True] / speed:.2f} ({method})" for (method, is_continuous), speed in once.items()
        if not is_continuous and (method, True) in once
    ]  # fmt: skip
    continuous = {
        (row["method"], row["concurrency"], row["images"]): row for row in rows if row["batching"] == "continuous"
    }
    gains = []
    for (method, clients, images), plain in sorted(continuous.items(), key=lambda item: item[0][1:]):
        drafted = continuous.get(("speculative", clients, images))
        if method == "plain" and drafted is not None:
            speed, latency = (drafted[key] / plain[key] for key in ("images_per_second", "latency_p50"))
            gains.append(f"{clients} ({images} pictures): {speed:.2f} and {latency:.2f}")
    return [
        f"- {most} requests at once, images/s over those of static batches: {', '.join(ratios)}.",
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
    parser.add_argument("--seconds", type=float, default=600, help="no new measurement starts after this")
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--render", type=Path, nargs="+", metavar="JSON", help="write the tables of these results")
    parser.add_argument("--page", type=Path, default=PAGE)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.render:
        write_tables(args.page, [json.loads(path.read_text(encoding="utf-8")) for path in args.render])
        return
    if args.model.startswith(PREFIX):
        drafter = "jacobi" if args.drafter == "auto" else args.drafter
        placement = resolve_placement(args.device, args.dtype)
        pipe = random_pipeline(args.model.removeprefix(PREFIX), placement, args.rows, drafter)
        pipe.tree = args.tree
    else:
        pipe = Pipeline.from_pretrained(
            args.model, drafter=args.drafter, tree=args.tree, device=args.device, dtype=args.dtype
        )
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

    def report(rows: list[dict[str, Any]]) -> None:
        if args.out is not None:
            atomic_write_json(args.out, {**about, "rows": rows})

    report(measure(pipe, args, report))


if __name__ == "__main__":
    main()
