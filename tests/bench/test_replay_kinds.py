"""Compact traces of many pictures, and benchmarks/replay_kinds.py, which records and replays them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_checkpoint
import torch

from underdraw.bench.records import read_record, record_sections
from underdraw.bench.replay import ReplayVerifier, Trace, load_traces, save_traces
from underdraw.errors import ConfigError
from underdraw.plan import TreePlan

ROOT = Path(__file__).parents[2]


def test_traces_survive_a_round_trip(tmp_path: Path) -> None:
    traces = [
        Trace((TreePlan(63, 1, 1, 64), TreePlan(12, 1, 1, 13)), (40, 0), {"kind": "plain", "seed": 1}),
        Trace((TreePlan(40, 2, 8, 64), TreePlan(80, 2, 8, 128), TreePlan(0, 1, 1, 1)), (7, 80, 0), {"kind": "photo"}),
    ]
    save_traces(tmp_path / "traces.npz", traces)
    assert load_traces(tmp_path / "traces.npz") == traces
    (tmp_path / "traces.npz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="holds no traces"):
        load_traces(tmp_path / "traces.npz")


def test_verifier_replays_one_trace_after_another_in_the_same_tensors() -> None:
    first, second = (Trace((TreePlan(3, 1, 1, 4),) * len(lengths), lengths, {}) for lengths in ((1, 2, 3), (0, 5)))
    verifier = ReplayVerifier(first, torch.device("cpu"))
    storage = verifier.lengths.data_ptr(), verifier.count.data_ptr()
    verifier.pass_number.add_(2)
    verifier.load(second)
    assert (verifier.lengths.data_ptr(), verifier.count.data_ptr()) == storage
    assert verifier.lengths[:2].tolist() == [0, 5] and int(verifier.count) == 2 and int(verifier.pass_number) == 0


def run_script(name: str, *arguments: object) -> str:
    device = () if "compare" in arguments else ("--device", "cpu")
    words = [sys.executable, f"benchmarks/{name}.py", *map(str, arguments), *device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sweep_is_a_result_that_pages_show(tmp_path: Path) -> None:
    model, result = small_checkpoint.write(tmp_path / "small", length=160, drafter=False), tmp_path / "sweep.json"
    drafts = ["--setting", "jacobi:window=7 chain:depth=7", "--setting", "jacobi-tree trunk:nodes=16"]
    options = ["--model", model, "--per-kind", 1, "--batch", 5, "--json", result, *drafts]
    run_script("jacobi_trees", *options, "--temperature", 1)
    run_script("jacobi_trees", *options, "--temperature", 0.5)
    (section,) = record_sections(read_record(result))
    assert section.table is not None
    assert section.table.columns[:4] == ("T", "drafter and tree", "all", "plain background")
    assert [row[0] for row in section.table.rows] == ["1", "1", "0.5", "0.5"]
    assert [row[-1] for row in section.table.rows] == ["5 of 5"] * 4
    assert "%" not in section.table.rows[2][2] and " %)" in section.table.rows[3][2]


def test_traces_are_recorded_and_replayed(tmp_path: Path) -> None:
    run = functools.partial(run_script, "replay_kinds")
    model = small_checkpoint.write(tmp_path / "small", length=160, drafter=False)
    costs = ["--costs", tmp_path / "costs.json"]
    run("costs", tmp_path / "costs.json", "--model", "toy", "--sizes", 1, 8, 16)
    record = functools.partial(run, "record", tmp_path / "traces.npz", "--model", model, "--per-kind", 1, "--batch", 5)
    record("--setting", "chain 64", "--setting", "tree 16")
    record("--add", "--setting", "auto", *costs)
    traces = load_traces(tmp_path / "traces.npz")
    settings = {"chain 64", "tree 16", "auto"}
    assert len(traces) == 15 and {trace.about["setting"] for trace in traces} == settings
    assert all(sum(trace.accepted) + len(trace.accepted) == small_checkpoint.TOKENS for trace in traces)
    compared = run("compare", tmp_path / "traces.npz", *costs)
    text = run(
        "replay", tmp_path / "traces.npz", "--model", "toy", "--limit", 3, "--out", tmp_path / "replay.json", *costs
    )
    result = json.loads((tmp_path / "replay.json").read_text())
    assert len(result["rows"]) == 3 and all(row["over_plain"] > 0 for row in result["rows"])
    assert f"auto: plain {result['by_costs']['auto']['plain']:.2f}, " in compared and compared.count("photo") == 3
    assert "random:toy" in text and "chain 64 | **" in text
    section, fixed, growth = record_sections(read_record(tmp_path / "replay.json"))
    assert fixed.table is not None and {row[0] for row in fixed.table.rows} == settings
    assert " %)" in fixed.table.rows[-1][1] and fixed.table.columns[-1] == "all"
    assert growth.table is not None and [row[0] for row in growth.table.rows] == ["1", "8", "16"]
    assert growth.table.rows[0][2:] == ["-", "-"] and " %)" in growth.table.rows[2][3]
    assert section.table is not None and section.table.columns[1:3] == ("plain background", "gradient")
    assert [row[0] for row in section.table.rows] == ["chain 64"] and section.table.rows[0][-1] == "3"
