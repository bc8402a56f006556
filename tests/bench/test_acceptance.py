"""Statistics of a model and its drafter: by hand, against real trees, and through the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import toy_models
from commands import call

from underdraw import Pipeline
from underdraw.bench.acceptance import (
    acceptance_by_depth,
    correlation,
    first_child_correlation,
    history_statistics,
    length_correlation,
)
from underdraw.bench.draft_probe import can_probe, probe_draft
from underdraw.history import History, StepResult, TokenStats
from underdraw.layout import Layout
from underdraw.plan import TreePlan

LAYOUT = Layout(3, 4, range(100, 164))


def make_history(lengths: list[int]) -> History:
    """A picture of 3 x 4 codes whose passes accepted these numbers of tokens."""
    history = History(LAYOUT)
    history.record_first(100, TokenStats(2.0, 0.5))
    step = 0
    for length in lengths:
        count = min(length + 1, LAYOUT.steps - 1 - step)
        tokens = tuple(range(100, 100 + count))
        token_stats = tuple(TokenStats(1.0, 0.995) for _ in tokens)
        ranks = (0,) * (count - 1)
        history.record(StepResult(0, 0, step, count - 1, TreePlan(4, 1, 1, 5), tokens, ranks, 0.1, token_stats))
        step += count
    assert history.done
    return history


def test_history_statistics_by_hand() -> None:
    statistics = history_statistics([make_history([2, 0, 3, 2])])
    assert statistics["lengths"] == [1, 0, 2, 1] and statistics["tokens_per_pass"] == 2.75
    assert statistics["entropy"] == round((2 + 11) / 12, 4) and statistics["certain"] == round(11 / 12, 4)
    # First cells of the passes: 1, 4, 5, 9; left of 5 is 4; above 4, 5, 9 are 0, 1, 5; 0 was sampled after prefill.
    assert length_correlation([make_history([2, 0, 3, 2])], 0, -1) == correlation(np.array([[3, 0], [2, 3]]))
    assert length_correlation([make_history([2, 0, 3, 2])], -1, 0) == correlation(np.array([[3, 2], [2, 3]])) == -1


def test_correlation_by_hand() -> None:
    assert correlation(np.array([[0, 1], [1, 3], [2, 5]])) == 1 and correlation(np.array([[1, 1], [1, 2]])) is None
    assert correlation(np.zeros((0, 2))) is None


def test_first_child_correlation_by_hand() -> None:
    """Every row equals the row above it, shifted to the left by one: cells equal their above-right neighbours."""
    hits = np.array([[1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0]])
    ranks = np.full((LAYOUT.steps, 2), -1)
    ranks[: LAYOUT.steps - 1, 0] = 1 - hits.ravel()[1:]  # the rank at a root is that of the next cell
    correlations = first_child_correlation([make_history([11])], [ranks])
    assert correlations["above-right"] == 1 and correlations["left"] is not None and correlations["left"] < 1


def test_acceptance_by_depth_by_hand() -> None:
    ranks = np.array([[[0, 3], [1, -1], [9, 7], [-1, -1]]])
    assert acceptance_by_depth(ranks) == [[0.3333, 0.6667, 0.6667, 0.6667], [0, 0, 0.5, 1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probe_predicts_accepted_lengths_of_chains(small_model: Path, temperature: float) -> None:
    """A chain is accepted as far as the target's tokens have rank 0, one after the other."""
    pipe = Pipeline.from_pretrained(small_model, tree="chain:depth=3")
    pipe.drafter = toy_models.near(pipe.model.target)
    request = pipe.request("a red fox", seed=3, temperature=temperature)
    jacobi = Pipeline(pipe.model, drafter="jacobi").drafter
    assert can_probe(pipe.drafter, pipe, request) and not can_probe(jacobi, pipe, request)
    steps: list[StepResult] = []
    output = pipe.generate(request, callback_on_step_end=lambda *details: steps.append(details[3]["step"]))
    ranks = probe_draft(pipe, request, output.history, 3).ranks
    for step in steps:
        best = ranks[step.start, : step.plan.depth] == 0
        assert step.accepted == int(np.cumprod(best).sum()), step
    assert (ranks[:-1, 0] >= 0).all() and ranks[-2, 1] == -1 and {0, 3} <= {step.accepted for step in steps}


def test_statistics_command(mini: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "statistics.json"
    options = [
        "-m",
        mini,
        "--prompts",
        prompts,
        "--limit",
        2,
        "--out",
        out,
        "--tree",
        "chain:depth=2",
        "--json",
        "--force",
    ]
    record = call("evaluate", "statistics", *options).record
    assert record == json.loads(out.read_text()) and record["loss"] is None and record["prompts"] == 2
    warm, cold = record["entries"]
    assert (warm["temperature"], cold["temperature"]) == (1, 0) and warm["entropy"] > 1
    assert cold["accepted"] == cold["accepted_by_q"] and warm["accepted"] != warm["accepted_by_q"]
    assert len(warm["accepted"]) == 6 and all(row == sorted(row) for row in warm["accepted"])
    page = tmp_path / "page.md"
    page.write_text("<!-- results: statistics.json -->\n<!-- end -->\n")
    assert call("plot", "--page", page).code == 0 and "| depth | T=1: 1 |" in page.read_text()
    jacobi = call("evaluate", "statistics", *options, "--drafter", "jacobi", "--temperature", 1).record
    assert "accepted" not in jacobi["entries"][0] and sum(jacobi["entries"][0]["lengths"]) > 0
    assert call("plot", "--page", page).code == 0
    assert "16 and more" in page.read_text() and "Drafter jacobi" in page.read_text()
    out.write_text('{"kind": "else"}')
    assert "unknown kind 'else'" in call("plot", "--page", page).err
    for words, message in (
        (["--limit", 0], "'--limit': 0 should be"),
        (["--prompts", "nowhere.txt"], "does not exist"),
    ):
        result = call("evaluate", "statistics", *options, *words)
        assert result.code == 2 and message in result.err and result.err.count("\n") == 1


def test_statistics_command_shows_progress_from_the_start(mini: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["-m", mini, "--prompts", prompts, "--limit", 1, "--out", tmp_path / "statistics.json"]
    result = call("evaluate", "statistics", *options)
    assert result.code == 0 and result.err.splitlines() == [
        f"underdraw evaluate statistics: loading {mini}",
        "measuring: 2 images",
    ]
    assert "| T | entropy, nats per code |" in result.out
