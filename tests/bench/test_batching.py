"""`benchmarks/batching.py`: throughput and latency of continuous batching, and the tables that it writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: object) -> None:
    command = [sys.executable, "benchmarks/batching.py", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=300)


def test_batching_measures_and_writes_the_table(tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", tmp_path / "toy.json"
    page.write_text("before\n<!-- batching -->\nold\n<!-- /batching -->\nafter\n")
    options = (
        "--concurrency",
        1,
        3,
        "--static",
        2,
        "--rows",
        2,
        "--images",
        2,
        "--tree",
        "chain:depth=3",
        "--no-warmup",
    )
    run("--model", "random:toy", "--device", "cpu", *options, "-o", out)
    rows = json.loads(out.read_text())["rows"]
    keys = [(row["method"], row["batching"], row["concurrency"]) for row in rows]
    assert keys == [
        (method, batching, count)
        for method in ("plain", "speculative")
        for batching, count in (("static 2", 3), ("continuous", 3), ("continuous", 3), ("continuous", 1))
    ]
    assert [row["images"] for row in rows[:4]] == [3, 3, 6, 4], "at once, then two for each client, at least four"
    for row in rows:
        assert row["images_per_second"] > 0 and row["latency_p95"] >= row["latency_p50"] > 0
        assert (row["tokens_per_pass"] == 1) == (row["method"] == "plain")
    run("--render", out, "--page", page)
    text = page.read_text()
    assert text.startswith("before\n<!-- batching -->\nModel `random:toy`") and "old" not in text
    assert text.endswith("<!-- /batching -->\nafter\n") and "| plain | static 2 | 3 | 3 |" in text
    assert re.search(
        r"^- 3 requests at once, .* static batches: [\d.]+ \(plain\), [\d.]+ \(speculative\)\.$", text, re.M
    )
    assert re.search(r"by clients: 1 \(4 pictures\): [\d.]+ and [\d.]+; 3 \(3 .*; 3 \(6 .*\.$", text, re.M)
