"""`benchmarks/batching.py`: throughput and latency of continuous batching, and the tables that it writes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from underdraw.bench.replay import Trace
from underdraw.plan import TreePlan

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import batching  # noqa: E402
import batching_replay  # noqa: E402


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["batching.py", *map(str, arguments)])
    batching.main()


def test_batching_measures_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    run(monkeypatch, "--model", "random:toy", "--device", "cpu", *options, "-o", out)
    rows = json.loads(out.read_text())["rows"]
    keys = [(row["method"], row["batching"], row["slots"], row["concurrency"], row["images"]) for row in rows]
    assert keys == [
        (method, *row)
        for method in ("plain", "speculative")
        for row in (
            ("static", 2, 3, 3),
            ("continuous", 3, 3, 3),
            ("continuous", 3, 1, 4),
            ("continuous", 2, 3, 3),
            ("continuous", 3, 3, 6),
            ("static", 3, 3, 3),
        )
    ]
    for row in rows:
        assert row["images_per_second"] > 0 and row["latency_p95"] >= row["latency_p50"] > 0
        assert (row["tokens_per_pass"] == 1) == (row["method"] == "plain")
    run(monkeypatch, "--render", out, "--page", page)
    text = page.read_text()
    assert text.startswith("before\n<!-- batching -->\nModel `random:toy`") and "old" not in text
    assert text.endswith("<!-- /batching -->\nafter\n") and "| plain | static | at once | 2 | 3 | 3 |" in text
    assert re.search(
        r"^- 3 requests .* batches of 2: [\d.]+ with 2 slots \(plain\), [\d.]+ with 3 slots .*\.$",
        text,
        re.M,
    )
    assert re.search(r"by clients: 3: [\d.]+ and [\d.]+; 1: [\d.]+ and [\d.]+\.$", text, re.M)


def test_recorded_lengths_are_replayed_by_window_and_step() -> None:
    traces = [
        Trace((TreePlan(window, 1, 1, window + 1),) * len(accepted), accepted, {"window": window})
        for window, accepted in ((1, (1, 0, 1)), (3, (3, 0)))
    ]
    windows, lengths = batching_replay.lengths_by_step(traces)
    assert windows.tolist() == [1, 3]
    assert lengths.tolist() == [[[1, 0, 0, 1, 0]], [[3, 2, 1, 0, 0]]], "in the middle of a pass, what was left of it"
