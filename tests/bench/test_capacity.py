"""`underdraw plan`: images per hour from measured times and tokens per pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import call

from underdraw.bench.capacity import CapacityPlan, ModelCosts, estimate

COSTS = ModelCosts(
    "GPU", 1000, {1: 5.0, 64: 6.0, 128: 8.0}, prefill_ms={1: 20, 8: 48}, pixels_ms=30, png_ms=50, png_bytes=10**6
)


def test_time_of_an_image_is_prefill_passes_and_pixels() -> None:
    plain = estimate(COSTS, CapacityPlan(1e6, 1, tokens_per_pass=1, nodes=1, batch=1))
    assert plain.images_per_hour == pytest.approx(3600 / 5.05) and plain.shares["PNG"] == 0
    assert plain.shares["passes"] == pytest.approx(5 / 5.05) and sum(plain.shares.values()) == pytest.approx(1)
    drafted = estimate(COSTS, CapacityPlan(1e6, 8, tokens_per_pass=4, nodes=64, batch=1))
    assert drafted.images_per_hour == pytest.approx(8 * 3600 / (0.05 + 250 * 0.006))
    assert drafted.hours == pytest.approx(1e6 / drafted.images_per_hour)
    assert drafted.gpu_hours_per_million == pytest.approx(8 * drafted.hours)
    assert drafted.bytes_per_second == pytest.approx(1e6 * drafted.images_per_hour / 3600)


def test_images_of_a_batch_share_passes() -> None:
    assert COSTS.pass_time(96) == pytest.approx(7.0) and COSTS.pass_time(1) == 5.0
    assert COSTS.prefill_time(1) == 20 and COSTS.prefill_time(8) == COSTS.prefill_time(99) == 6
    two = estimate(COSTS, CapacityPlan(1, 1, tokens_per_pass=4, nodes=64, batch=2))
    assert two.images_per_hour == pytest.approx(3600 / (0.012 + 0.03 + 250 * 0.008 / 2))


def test_png_counts_where_nothing_hides_it() -> None:
    costs = ModelCosts("GPU", 10, {1: 1.0}, prefill_ms={1: 1}, pixels_ms=1, png_ms=48)
    assert estimate(costs, CapacityPlan(1, 1, 1, 1, 1)).shares["PNG"] == pytest.approx(36 / 48)


def test_command_prints_a_table_and_json(tmp_path: Path) -> None:
    done = call("plan", "--model", "random:anole-7b", "--pictures", "1e6", "--gpus", 8, "--price", 2)
    assert done.code == 0 and done.out.count("tokens per pass:") == 4 and "per million" in done.out
    record = call("plan", "--gpus", 8, "--tokens-per-pass", 3, "--price", 2, "--json").record
    (row,) = record["rows"]
    assert row["cost_per_million"] == pytest.approx(2 * row["gpu_hours_per_million"], rel=1e-3)
    result = {"model": "mine", "tokens": 99, "pass_ms": {"1": 2.0}}
    (tmp_path / "costs.json").write_text(json.dumps({"machine": {"device": "mine"}, "results": [result]}))
    done = call("plan", "--model", "mine", "--costs", tmp_path / "costs.json", "--tokens-per-pass", 1)
    assert done.code == 0 and "without prefill, pixels, PNG" in done.out


def test_large_batches_are_called_optimistic() -> None:
    small, large = (call("plan", "--batch", batch, "--tokens-per-pass", 1).out for batch in (4, 64))
    assert "too optimistic" not in small and "too optimistic" in large


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model random:nothing", "random:anole-7b"),
        ("--model tiny", "--costs FILE"),
        ("--price -1", "--price -1 is not allowed"),
        ("--gpus 0", "0 should be greater than or equal to 1"),
        ("--tokens-per-pass 99", "--tokens-per-pass 99 is not allowed; use a number from 1 to 65"),
        ("--batch 4", "use a smaller --batch"),
        ("--costs missing.json", "missing.json"),
    ],
)
def test_bad_options(words: str, message: str) -> None:
    done = call("plan", *words.split())
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
