"""Tokens of plain decoding against chains and trees, for every model, dtype, batch and temperature, in a fixed time.

    python benchmarks/agreement_matrix.py OUT --seconds 450              # on a GPU: OUT gets a JSON file per model
    python benchmarks/agreement_matrix.py OUT --toy --seconds 20         # a toy model instead, also on a CPU

`underdraw bench agreement` draws all pictures of one setting, then those of the next. This script takes turns, so that
a short run still covers every pair of values: in the first turn every chain, tree and batch has one of the
temperatures, another one for every dtype; the next turns add the others, and later ones more pictures. Settings of few
rows come first. Models run in parallel processes, since correctness needs no clean timings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NODES, BATCHES, TEMPERATURES, PICTURES = (8, 24, 64, 128), (1, 3, 16), (1.0, 0.5, 0.0), 20
DRAWS = {1: 4, 3: 2, 16: 1}  # of a setting in one turn, by batch
DTYPES = ("bfloat16", "float16", "float32")
# Tokens of a picture and share of the time; the embedded model is cheap and draws a sixth of a picture.
MODELS = {"random:anole-7b": (24, 4.0), "random:lumina-7b": (24, 4.0), "random:llamagen-xl": (48, 2.0)}
EMBEDDED = (96, 1.5)


class Matrix:
    """The pictures of one model and dtype."""

    def __init__(self, model: str, dtype: str, tokens: int, out: Path) -> None:
        from underdraw.bench import agreement
        from underdraw.bench.environment import describe_machine
        from underdraw.engine.cuda_graphs import make_graph_cache
        from underdraw.models.loading import resolve_placement

        placement = resolve_placement("auto", dtype)
        subject = agreement.load_subject(model, placement, PICTURES)
        rows = -(-tokens // subject.layout.width) + 2  # of the picture: fewer than all need a smaller KV cache
        self.subject = replace(subject, layout=replace(subject.layout, height=min(rows, subject.layout.height)))
        self.out, self.dtype, self.tokens = out, dtype, tokens
        self.graphs, self.plain_graphs = (make_graph_cache(placement.device, "auto") for _ in range(2))
        if self.graphs is not None and self.plain_graphs is not None:
            self.graphs.max_runners, self.plain_graphs.max_runners = 1, len(TEMPERATURES)
        self.plain: dict[tuple[float, int], Any] = {}
        self.parts: dict[Any, Any] = {}  # drafter and policy by setting; graphs are kept for the same drafter
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        # Long prompts are left to small batches: with 16 pictures they would take most of the time.
        self.seeds = {b: cycle([s for s in range(PICTURES) if b < 16 or s % 5 != 4]) for b in BATCHES}
        self.record = {
            "kind": "matrix",
            "model": Path(model).name,
            "weights": "full",
            "tokens": tokens,
            "machine": describe_machine(placement.device),
            "guidance": subject.guidance,
            "numerics": subject.target.numerics,
        }

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
        facts = {"temperature": temperature, "kind": setting.kind, "nodes": setting.nodes, "batch": setting.batch}
        row = self.rows.setdefault(
            tuple(facts.values()), {"dtype": self.dtype, **facts, **dict.fromkeys(COUNTS, 0)}
        )  # fmt: skip
        counts = len(seeds), int(same.all(1).sum()), same.numel(), int(same.long().cumprod(1).sum())
        row.update({key: row[key] + count for key, count in zip(COUNTS, counts, strict=True)})
        if counts[1] < counts[0]:
            print(f"DIFFERENT {self.record['model']} {self.dtype} {facts}: seeds {seeds}, {same.sum(1)}", flush=True)

    def save(self) -> None:
        self.out.write_text(json.dumps({**self.record, "rows": list(self.rows.values())}, indent=1) + "\n")

    def run(self, stop: float, toy: bool) -> None:
        import torch

        from underdraw.bench.agreement import settings

        cells = list(settings((8, 24) if toy else NODES, (1, 3) if toy else BATCHES))
        cells.sort(key=lambda cell: cell.nodes * cell.batch)
        for turn in range(4 if toy else 1000):
            for index, cell in enumerate(cells):
                temperature = TEMPERATURES[(index + turn + DTYPES.index(self.dtype)) % len(TEMPERATURES)]
                for _ in range(DRAWS[cell.batch]):
                    if time.time() > stop:
                        return
                    with torch.inference_mode():
                        self.compare(temperature, cell)
                self.save()


COUNTS = ("pictures", "pictures_equal", "tokens", "tokens_equal")


def run_job(model: str, dtype: str, tokens: int, out: Path, seconds: float, toy: bool) -> None:
    stop = time.time() + seconds
    matrix = Matrix(model, dtype, tokens, out)
    print(f"{model} {dtype}: loaded, {stop - time.time():.0f} s left", flush=True)
    matrix.run(stop, toy)
    matrix.save()


def start_jobs(jobs: list[tuple[str, str, int, float]], options: argparse.Namespace) -> None:
    """Run the jobs in `options.processes` processes at a time; each has its share of the time."""
    stop, waiting, running = time.time() + options.seconds, list(jobs), {}
    while waiting or running:
        for process in [p for p in running if p.poll() is not None or time.time() > running[p] + 60]:
            process.kill()  # only a job that hangs
            del running[process]
        while waiting and len(running) < options.processes and time.time() < stop - 5:
            model, dtype, tokens, share = waiting.pop(0)
            total = sum(job[3] for job in waiting) + share
            seconds = min((stop - time.time()) * options.processes * share / total, stop - time.time())
            words = [model, dtype, str(tokens), f"{seconds:.0f}"]
            paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(Path(__file__).resolve()), str(options.out), *["--toy"] * options.toy]
            environment = {**os.environ, "PYTHONPATH": paths, "TQDM_DISABLE": "1"}
            running[subprocess.Popen([*command, "--job", *words], env=environment)] = time.time() + seconds
        if time.time() > stop and waiting:
            print(f"no time was left for {[job[:2] for job in waiting]}", flush=True)
            waiting.clear()
        time.sleep(0.5)


def merge(out: Path) -> None:
    """One file per model of the files per model and dtype; prints how many pictures are equal."""
    records = defaultdict(list)
    for path in sorted((out / "parts").glob("*.json")):
        record = json.loads(path.read_text())
        records[record["model"]].append(record)
    for model, parts in records.items():
        parts.sort(key=lambda part: DTYPES.index(part["rows"][0]["dtype"]) if part["rows"] else len(DTYPES))
        rows = [row for part in parts for row in part["rows"]]
        (out / f"{model.partition(':')[2] or model}.json").write_text(
            json.dumps({**parts[0], "rows": rows}, indent=1) + "\n"
        )
        drawn, equal = (sum(row[key] for row in rows) for key in COUNTS[:2])
        few = [row for row in rows if row["pictures"] < PICTURES]
        print(f"{model}: {equal} of {drawn} pictures equal, {len(rows)} settings, {len(few)} with under {PICTURES}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", default="tiny", help="the embedded model, or a folder that holds it")
    parser.add_argument("--seconds", type=float, default=450, help="of the whole run")
    parser.add_argument("--processes", type=int, default=3, help="models that run at the same time")
    parser.add_argument("--toy", action="store_true", help="a toy model and few settings, to try the script")
    parser.add_argument("--job", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    (options.out / "parts").mkdir(parents=True, exist_ok=True)
    if options.job is not None:
        model, dtype, tokens, seconds = options.job
        name = f"{Path(model).name.partition(':')[2] or Path(model).name}-{dtype}.json"
        return run_job(model, dtype, int(tokens), options.out / "parts" / name, float(seconds), options.toy)
    models = {"random:toy": (12, 1.0)} if options.toy else {**MODELS, options.tiny: EMBEDDED}
    dtypes = DTYPES[2:] if options.toy else DTYPES
    start_jobs([(model, dtype, *models[model]) for dtype in dtypes for model in models], options)
    merge(options.out)


if __name__ == "__main__":
    main()
