"""Statistics of a model and its drafter: by hand, against real trees, and through the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import call

from underdraw import Pipeline
from underdraw.bench.acceptance import between_passes, by_depth, correlation, drawn, first_child
from underdraw.bench.draft_probe import can_probe, probe
from underdraw.history import History, StepResult, TokenStats
from underdraw.layout import Layout
from underdraw.plan import TreePlan

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(3, 4, range(100, 164))


def history(lengths: list[int]) -> History:
    """A picture of 3 x 4 codes whose passes accepted so many guesses."""
    made = History(LAYOUT)
    made.record_first(100, TokenStats(2.0, 0.5))
    step = 0
    for length in lengths:
        count = min(length + 1, LAYOUT.steps - 1 - step)
        tokens = tuple(range(100, 100 + count))
        token_stats = tuple(TokenStats(1.0, 0.995) for _ in tokens)
        ranks = (0,) * (count - 1)
        made.record(StepResult(0, 0, step, count - 1, TreePlan(4, 1, 1, 5), tokens, ranks, 0.1, token_stats))
        step += count
    assert made.done
    return made


def test_histories_by_hand() -> None:
    found = drawn([history([2, 0, 3, 2])])
    assert found["lengths"] == [1, 0, 2, 1] and found["tokens_per_pass"] == 2.75
    assert found["entropy"] == round((2 + 11) / 12, 4) and found["certain"] == round(11 / 12, 4)
    # First cells of the passes: 1, 4, 5, 9; left of 5 is 4; above 4, 5, 9 are 0, 1, 5; 0 came with the prompt.
    assert between_passes([history([2, 0, 3, 2])], 0, -1) == correlation(np.array([[3, 0], [2, 3]]))
    assert between_passes([history([2, 0, 3, 2])], -1, 0) == correlation(np.array([[3, 2], [2, 3]])) == -1


def test_correlations_by_hand() -> None:
    assert correlation(np.array([[0, 1], [1, 3], [2, 5]])) == 1 and correlation(np.array([[1, 1], [1, 2]])) is None
    assert correlation(np.zeros((0, 2))) is None


def test_neighbours_by_hand() -> None:
    """Rows of the map that equal the row above them, shifted to the left by one: a cell knows its above-right."""
    hits = np.array([[1, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0]])
    ranks = np.full((LAYOUT.steps, 2), -1)
    ranks[: LAYOUT.steps - 1, 0] = 1 - hits.ravel()[1:]  # a root tells of the next cell
    found = first_child([history([11])], [ranks])
    assert found["above-right"] == 1 and found["left"] is not None and found["left"] < 1


def test_ranks_by_depth() -> None:
    ranks = np.array([[[0, 3], [1, -1], [9, 7], [-1, -1]]])
    assert by_depth(ranks) == [[0.3333, 0.6667, 0.6667, 0.6667], [0, 0, 0.5, 1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_probe_says_what_trees_do(small_model: Path, temperature: float) -> None:
    """Where a chain stood, it accepted as many tokens as the probe found to be the best child, one after the other."""
    pipe = Pipeline.from_pretrained(small_model, tree="chain:depth=3")
    job = pipe.request("a red fox", seed=3, temperature=temperature)
    assert can_probe(pipe.drafter, pipe, job) and not can_probe(
        Pipeline(pipe.model, drafter="jacobi").drafter, pipe, job
    )
    steps: list[StepResult] = []
    out = pipe(
        "a red fox", seed=3, temperature=temperature, callback_on_step_end=lambda *known: steps.append(known[3]["step"])
    )
    ranks = probe(pipe, job, out.history, 3).ranks
    for step in steps:
        best = ranks[step.start] == 0
        assert step.accepted == int(np.cumprod(best).sum()), step
    assert (ranks[:-1, 0] >= 0).all() and ranks[-2, 1] == -1 and (temperature == 0 or any(s.accepted for s in steps))


def test_the_command(mini: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "statistics.json"
    given = ["-m", mini, "--prompts", prompts, "--limit", 2, "--out", out, "--tree", "chain:depth=2", "--json"]
    found = call("evaluate", "statistics", *given).record
    assert found == json.loads(out.read_text()) and found["loss"] is None and found["prompts"] == 2
    warm, cold = found["entries"]
    assert (warm["temperature"], cold["temperature"]) == (1, 0) and warm["entropy"] > 1
    assert cold["accepted"] == cold["accepted_by_q"] and warm["accepted"] != warm["accepted_by_q"]
    assert len(warm["accepted"]) == 6 and all(row == sorted(row) for row in warm["accepted"])
    page = tmp_path / "page.md"
    page.write_text("<!-- results: statistics.json -->\n<!-- end -->\n")
    assert call("plot", "--page", page).code == 0 and "| depth | T=1: 1 |" in page.read_text()
    jacobi = call("evaluate", "statistics", *given, "--drafter", "jacobi", "--temperature", 1).record
    assert "accepted" not in jacobi["entries"][0] and sum(jacobi["entries"][0]["lengths"]) > 0
    assert call("plot", "--page", page).code == 0 and "16 and more" in page.read_text()
    out.write_text('{"kind": "else"}')
    assert "no result of one of" in call("plot", "--page", page).err
    for words, says in ((["--limit", 0], "--limit 0"), (["--prompts", "nowhere.txt"], "does not exist")):
        done = call("evaluate", "statistics", *given, *words)
        assert done.code == 2 and says in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("page", ["src/underdraw/assets/tiny/README.md", "docs/lab.md"])
def test_pages_are_made_from_the_results(page: str) -> None:
    done = call("plot", "--page", ROOT / page, "--json")
    assert done.code == 0 and done.record["changed"] is False
