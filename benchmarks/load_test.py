"""Load test of the server on loopback: `python benchmarks/load_test.py [--clients 64] [--requests 500]`.

Starts `underdraw serve`, lets many clients ask at once, and checks every answer: a picture that equals that of plain
decoding with the same prompt and seed, or a 429. `--record` stores the result and writes the table of docs/serving.md;
with `--busy` without times, for a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from underdraw import Pipeline
from underdraw.bench.environment import describe_machine
from underdraw.io import atomic_write_json

ROOT = Path(__file__).parent
RESULTS, PAGE = ROOT / "results" / "load", ROOT.parent / "docs" / "serving.md"
BLOCK = re.compile(r"(<!-- load -->\n).*?(<!-- /load -->)", re.S)
PROMPTS = ("a fox, 3D render, on a sky blue background", "a red apple, 3D render", "an owl, 3D render", "a house")
TREES = ("auto", "none")
CLIENT_TIMEOUT = 3600  # seconds: slow machines are no failures


@dataclass
class Tally:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of answers with a picture
    pictures: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # (prompt, seed) -> digests of pixels
    sent: int = 0


def digest(image: Image.Image) -> str:
    return hashlib.sha256(np.asarray(image.convert("RGB")).tobytes()).hexdigest()


async def run_client(client: httpx.AsyncClient, tally: Tally, options: argparse.Namespace) -> None:
    """Send requests until all clients together have sent enough."""
    while tally.sent < options.requests:
        number, tally.sent = tally.sent, tally.sent + 1
        prompt, seed = PROMPTS[number % len(PROMPTS)], number % options.seeds
        body = {"prompt": prompt, "seed": seed, "tree": TREES[number % 9 == 8]}  # every ninth is plain
        started = time.perf_counter()
        answer = await client.post("/v1/images/generations", json=body)
        tally.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            tally.seconds.append(time.perf_counter() - started)
            pixels = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
            tally.pictures.setdefault((prompt, seed), set()).add(digest(pixels))
        elif answer.status_code == 429:
            await asyncio.sleep(min(options.max_wait, float(answer.headers["retry-after"])))


async def run_clients(url: str, options: argparse.Namespace) -> tuple[Tally, float]:
    tally = Tally()
    limits = httpx.Limits(max_connections=options.clients)
    async with httpx.AsyncClient(base_url=url, timeout=CLIENT_TIMEOUT, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(run_client(client, tally, options) for _ in range(options.clients)))
        return tally, time.perf_counter() - started


def resident_megabytes(process: int) -> float:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def count_wrong(model: str, tally: Tally) -> int:
    """Pictures that differ from plain decoding in this process."""
    pipe = Pipeline.from_pretrained(model, tree="none", drafter="jacobi")
    expected = {(prompt, seed): digest(pipe(prompt, seed=seed).images[0]) for prompt, seed in tally.pictures}
    return sum(digests != {expected[key]} for key, digests in tally.pictures.items())


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, run the clients, stop it; returns the record."""
    words = ["serve", "--model", options.model, "--port", "0", "--slots", str(options.slots), "--quiet"]
    words += ["--queue", str(options.queue), "--timeout", str(CLIENT_TIMEOUT)]
    command = [sys.executable, "-m", "underdraw", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[-1]
            started = time.perf_counter()
            httpx.post(f"{url}v1/images/generations", json={"prompt": PROMPTS[0]}, timeout=300).raise_for_status()
            first = time.perf_counter() - started
            before = resident_megabytes(server.pid)
            tally, seconds = asyncio.run(run_clients(url, options))
            after = resident_megabytes(server.pid)
        finally:
            server.terminate()
        server.wait(60)
    drawn, refused = tally.statuses[200], tally.statuses[429]
    return {
        "model": Path(options.model).name,
        "clients": options.clients,
        "requests": tally.sent,
        "pictures": drawn,
        "refused_429": refused,
        "other": tally.sent - drawn - refused,
        "compared": len(tally.pictures),
        "wrong": count_wrong(options.model, tally),
        "first_picture_seconds": round(first, 2),
        "images_per_second": round(drawn / seconds, 2),
        "p50_seconds": round(statistics.median(tally.seconds), 2),
        "p95_seconds": round(statistics.quantiles(tally.seconds, n=20)[-1], 2),
        "megabytes_before": round(before),
        "megabytes_after": round(after),
        "exit_code": server.returncode,
        "slots": options.slots,
        "queue": options.queue,
        "max_wait": options.max_wait,
        "is_timed": not options.busy,
        "machine": describe_machine(torch.device("cpu")),
    }


def render(records: list[dict[str, Any]]) -> str:
    """The table of some results."""
    lines = [
        "| model | clients | requests | pictures | 429 | lost or failed | compared with plain decoding | different "
        "| first picture | images/s | latency p50, p95 | memory before, after |",
        "|---" * 12 + "|",
    ]
    for row in records:
        times = ["not timed"] * 3
        if row["is_timed"]:
            times = [f"{row['first_picture_seconds']:.1f} s", f"{row['images_per_second']:.2f}"]
            times.append(f"{row['p50_seconds']:.1f} s, {row['p95_seconds']:.1f} s")
        columns = [row[name] for name in ("model", "clients", "requests", "pictures", "refused_429", "other")]
        columns += [f"all, {row['compared']} different ones", row["wrong"], *times]
        lines.append(
            "| " + " | ".join(map(str, columns)) + f" | {row['megabytes_before']}, {row['megabytes_after']} MB |"
        )
    machine = records[-1]["machine"]
    about = f"{machine['processor']}, {machine['threads']} threads, float32, torch {machine['torch']}"
    slots = f"{records[-1]['slots']} slots, a queue of {records[-1]['queue']}"
    return "\n".join([*lines, "", f"{slots}; {about}, commit {(machine['commit'] or 'unknown')[:12]}."])


def record(result: dict[str, Any], folder: Path, page: Path) -> None:
    """Store a result, and write the table of all results to the page."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / f"{result['model']}.json", result)
    table = render([json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))])
    text, count = BLOCK.subn(lambda match: f"{match[1]}{table}\n{match[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise SystemExit(f"{page} must have one block from <!-- load --> to <!-- /load -->, and has {count}.")
    page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="tiny, or the folder of another model")
    parser.add_argument("--clients", type=int, default=64, help="requests at a time")
    parser.add_argument("--requests", type=int, default=500, help="requests in all")
    parser.add_argument("--seeds", type=int, default=5, help="different seeds, each compared with plain decoding")
    parser.add_argument("--slots", type=int, default=8, help="slots of the server")
    parser.add_argument("--queue", type=int, default=32, help="queue of the server")
    parser.add_argument("--max-wait", type=float, default=15, help="longest wait after a 429, in seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--busy", action="store_true", help="the machine has other things to do: times mean nothing")
    parser.add_argument("--record", action="store_true", help="store the result and write the table of the page")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the table")
    options = parser.parse_args()
    result = run(options)
    print(json.dumps(result) if options.json else render([result]), flush=True)
    is_wrong = bool(result["other"] or result["wrong"] or result["exit_code"] != 0)
    if options.record and not is_wrong:
        record(result, options.results, options.page)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
