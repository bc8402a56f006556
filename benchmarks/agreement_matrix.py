"""Tokens of plain decoding against chains and trees, for every model, dtype, batch and temperature, in a fixed time.

    python benchmarks/agreement_matrix.py OUT --seconds 350              # on a GPU: OUT gets JSON files of each model
    python benchmarks/agreement_matrix.py OUT --toy --seconds 20         # a toy model instead, also on a CPU

`underdraw bench agreement` draws all pictures of one setting, then those of the next. This script takes turns, so that
a short run still covers everything: first one draw of every chain, tree and batch at every temperature, then more until
each of them has 20 pictures. Random models have 4 of their layers in all dtypes, which run the kernels of all layers
on matrices of the same shapes, and all of their layers in bfloat16 as far as the time goes. Models run in parallel
processes, since correctness needs no clean timings. The same command at the same commit goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NODES, BATCHES, TEMPERATURES, PICTURES = (8, 24, 64, 128), (1, 3, 16), (1.0, 0.5, 0.0), 20
DTYPES = ("bfloat16", "float16", "float32")
RANDOM = ("random:anole-7b", "random:lumina-7b", "random:llamagen-xl")
TOKENS, EMBEDDED_TOKENS = 12, 48  # of a picture; the embedded model is small
FEW_LAYERS = 4
COUNTS = ("pictures", "pictures_equal", "tokens", "tokens_equal")
CELL = ("temperature", "kind", "nodes", "batch")  # of the matrix


@dataclass(frozen=True)
class Job:
    """The settings of one model and dtype, in a process of its own."""

    model: str
    dtype: str
    layers: int = 0  # 0: all
    tokens: int = TOKENS
    share: float = 1.0  # of the time

    @property
    def name(self) -> str:
        """The model's name, with its number of layers if some are left out."""
        name = Path(self.model).name
        return f"{name.partition(':')[2] or name}{f'-{self.layers}-layers' * bool(self.layers)}"


def all_jobs(embedded: str) -> list[Job]:
    """Every model in every dtype; later all layers of the random ones, when their kernels are compiled."""
    few = [
        Job(model, DTYPES[(row + column) % 3], FEW_LAYERS, share=2.0 if "7b" in model else 1.2)
        for row in range(3)
        for column, model in enumerate(RANDOM)
    ]
    small = [Job(embedded, dtype, tokens=EMBEDDED_TOKENS) for dtype in DTYPES]
    mixed = [job for row in range(3) for job in (*few[3 * row : 3 * row + 3], small[row])]
    return mixed + [Job(model, DTYPES[0], share=1.5) for model in RANDOM]


def cell_key(temperature: float, setting: Any) -> tuple[Any, ...]:
    """The values of `CELL`."""
    return temperature, setting.kind, setting.nodes, setting.batch


class Matrix:
    """The pictures of one model and dtype."""

    def __init__(self, job: Job, out: Path) -> None:
        from underdraw.bench import agreement
        from underdraw.bench.environment import describe_machine
        from underdraw.engine.cuda_graphs import make_graph_cache
        from underdraw.models.loading import resolve_placement

        placement = resolve_placement("auto", job.dtype)
        subject = agreement.load_subject(job.model, placement, PICTURES, job.layers or None)
        rows = -(-job.tokens // subject.layout.width) + 2  # of the picture: fewer than all need a smaller KV cache
        self.subject = replace(subject, layout=replace(subject.layout, height=min(rows, subject.layout.height)))
        self.out, self.dtype, self.tokens = out, job.dtype, job.tokens
        self.graphs, self.plain_graphs = (make_graph_cache(placement.device, "auto") for _ in range(2))
        if self.graphs is not None and self.plain_graphs is not None:
            self.graphs.max_runners, self.plain_graphs.max_runners = 1, len(TEMPERATURES)
        self.plain: dict[tuple[float, int], Any] = {}
        self.parts: dict[Any, Any] = {}  # drafter and policy by setting; graphs are kept for the same drafter
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.seeds = {batch: cycle(range(PICTURES)) for batch in BATCHES}
        self.record = {
            "kind": "matrix",
            "model": Path(job.model).name,
            "weights": "full",
            "layers": job.layers or None,
            "tokens": job.tokens,
            "machine": describe_machine(placement.device),
            "guidance": subject.guidance,
            "numerics": subject.target.numerics,
        }
        self.resume()

    def resume(self) -> None:
        """Take over the pictures that an earlier run has compared at the same commit."""
        earlier = json.loads(self.out.read_text()) if self.out.exists() else {}
        if any(earlier.get(key) != value for key, value in self.record.items()):
            return
        for row in earlier["rows"]:
            self.rows[tuple(row[key] for key in CELL)] = row
            for _ in range(row["pictures"]):
                next(self.seeds[row["batch"]])

    def draw(self, seeds: list[int], temperature: float, setting: Any = None) -> Any:
        from underdraw.bench import agreement
        from underdraw.drafters.forced import Forced
        from underdraw.policies.fixed import NoTree

        is_plain = setting is None or setting.kind == "plain"
        if not is_plain and setting not in self.parts:
            self.parts[setting] = setting.parts()
        parts = (Forced(), NoTree()) if is_plain else self.parts[setting]
        graphs = self.plain_graphs if setting is None else self.graphs
        return agreement.draw(
            self.subject, seeds, *parts, temperature=temperature, graphs=graphs, tokens=self.tokens
        )  # fmt: skip

    def compare(self, temperature: float, setting: Any) -> None:
        """Draw some pictures at once and, one by one, the same ones by plain decoding."""
        import torch

        seeds = [next(self.seeds[setting.batch]) for _ in range(setting.batch)]
        seeds.sort(key=lambda seed: -len(self.subject.prompts[seed].condition))
        for seed in seeds:
            if (temperature, seed) not in self.plain:
                self.plain[temperature, seed] = self.draw([seed], temperature)[0]
        same = self.draw(seeds, temperature, setting) == torch.stack([self.plain[temperature, s] for s in seeds])
        facts = dict(zip(CELL, cell_key(temperature, setting), strict=True))
        row = self.rows.setdefault(
            tuple(facts.values()), {"dtype": self.dtype, **facts, **dict.fromkeys(COUNTS, 0)}
        )  # fmt: skip
        counts = len(seeds), int(same.all(1).sum()), same.numel(), int(same.long().cumprod(1).sum())
        row.update({key: row[key] + count for key, count in zip(COUNTS, counts, strict=True)})
        if counts[1] < counts[0]:
            print(f"DIFFERENT {self.record['model']} {self.dtype} {facts}: seeds {seeds}, {same.sum(1)}", flush=True)

    def save(self) -> None:
        self.out.write_text(json.dumps({**self.record, "rows": list(self.rows.values())}, indent=1) + "\n")

    def turns(self, toy: bool) -> Iterator[tuple[float, Any]]:
        """Every setting once, at another temperature for each dtype, then the other temperatures, then the rest."""
        from underdraw.bench.agreement import settings

        cells = list(settings((8, 24) if toy else NODES, (1, 3) if toy else BATCHES))
        cells.sort(key=lambda cell: cell.nodes * cell.batch)
        for turn in range((1 if toy else 2) * len(TEMPERATURES)):
            for index, cell in enumerate(cells):
                temperature = TEMPERATURES[(index + turn + DTYPES.index(self.dtype)) % len(TEMPERATURES)]
                wanted = 1 if turn < len(TEMPERATURES) else PICTURES
                while self.rows.get(cell_key(temperature, cell), {"pictures": 0})["pictures"] < wanted:
                    yield temperature, cell

    def run(self, stop: float, toy: bool) -> bool:
        """Whether all pictures were drawn before the time was up."""
        import torch

        last = None
        for temperature, cell in self.turns(toy):
            if time.time() > stop:
                return False
            if last != (temperature, cell):
                self.save()
            last = temperature, cell
            with torch.inference_mode():
                self.compare(temperature, cell)
        return True


def run_job(job: Job, out: Path, seconds: float, toy: bool) -> None:
    start = time.time()
    matrix = Matrix(job, out)
    print(f"{job.name} {job.dtype}: loaded after {time.time() - start:.0f} of {seconds:.0f} s", flush=True)
    is_complete = matrix.run(start + seconds, toy)
    matrix.save()
    state = "complete" if is_complete else f"{len(matrix.rows)} settings"
    print(f"{job.name} {job.dtype}: {state} after {time.time() - start:.0f} s", flush=True)


def start_jobs(jobs: list[Job], options: argparse.Namespace) -> None:
    """Run the jobs in `options.processes` processes at a time; each has its share of the time."""
    stop, waiting, running = time.time() + options.seconds, list(jobs), {}
    while waiting or running:
        for process in [p for p in running if p.poll() is not None or time.time() > running[p] + 60]:
            process.kill()  # only a job that hangs
            del running[process]
        while waiting and len(running) < options.processes and time.time() < stop - 5:
            job = waiting.pop(0)
            total = sum(other.share for other in waiting) + job.share
            seconds = min((stop - time.time()) * options.processes * job.share / total, stop - time.time())
            words = [job.model, job.dtype, str(job.layers), str(job.tokens), f"{seconds:.0f}"]
            paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(Path(__file__).resolve()), str(options.out), *["--toy"] * options.toy]
            environment = {**os.environ, "PYTHONPATH": paths, "TQDM_DISABLE": "1"}
            running[subprocess.Popen([*command, "--job", *words], env=environment)] = time.time() + seconds
        if time.time() > stop and waiting:
            print(f"no time was left for {[(job.name, job.dtype) for job in waiting]}", flush=True)
            waiting.clear()
        time.sleep(0.5)


def merge(out: Path) -> None:
    """One file per model of the files per model and dtype; prints how many pictures are equal."""
    records = defaultdict(list)
    for path in sorted((out / "parts").glob("*.json")):
        record = json.loads(path.read_text())
        if record["rows"]:
            records[path.stem.rpartition("-")[0]].append(record)
    for name, parts in records.items():
        parts.sort(key=lambda part: DTYPES.index(part["rows"][0]["dtype"]))
        rows = [row for part in parts for row in part["rows"]]
        (out / f"{name}.json").write_text(json.dumps({**parts[0], "rows": rows}, indent=1) + "\n")
        drawn, equal = (sum(row[key] for row in rows) for key in COUNTS[:2])
        few = [row for row in rows if row["pictures"] < PICTURES]
        print(f"{name}: {equal} of {drawn} pictures equal, {len(rows)} settings, {len(few)} with under {PICTURES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", default="tiny", help="the embedded model, or a folder that holds it")
    parser.add_argument("--seconds", type=float, default=350, help="of the whole run")
    parser.add_argument("--processes", type=int, default=5, help="models that run at the same time")
    parser.add_argument("--only", nargs="+", help="some of the models, such as tiny or anole-7b-4-layers")
    parser.add_argument("--toy", action="store_true", help="a toy model and few settings, to try the script")
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    (options.out / "parts").mkdir(parents=True, exist_ok=True)
    if options.job is not None:
        model, dtype, layers, tokens, seconds = options.job
        job = Job(model, dtype, int(layers), int(tokens))
        return run_job(job, options.out / "parts" / f"{job.name}-{dtype}.json", float(seconds), options.toy)
    toys = [Job("random:toy", DTYPES[2], layers) for layers in (1, 0)]
    jobs = all_jobs(options.tiny)
    names = sorted({job.name for job in jobs})
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: there are {', '.join(names)}.")
    jobs = [job for job in jobs if options.only is None or job.name in options.only]
    start_jobs(toys if options.toy else jobs, options)
    merge(options.out)


if __name__ == "__main__":
    main()
