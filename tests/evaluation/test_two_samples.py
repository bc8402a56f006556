"""The two-sample test: its formula against a double loop, its level under one law, its power against another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call

from underdraw.errors import ConfigError
from underdraw.metrics.two_sample import _kernel, counts, pairs, patterns, two_sample


def pictures(count: int, seed: int, *, repeat: float = 0.0) -> np.ndarray:
    """Random codes; with chance `repeat` a cell copies its left neighbour."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 50, (count, 6, 6))
    for col in range(1, 6):
        copied = random.random((count, 6)) < repeat
        codes[:, :, col] = np.where(copied, codes[:, :, col - 1], codes[:, :, col])
    return codes.astype(np.int32)


def test_views_by_hand() -> None:
    codes = np.array([[[1, 1], [1, 2]], [[0, 0], [0, 0]]], dtype=np.int32)
    assert np.allclose(counts(codes) ** 2, [[0, 0.75, 0.25], [1, 0, 0]])
    assert np.allclose((pairs(codes) ** 2).sum(1), 2) and (pairs(codes)[0] > 0).sum() == 4
    standing = patterns(codes)  # equal left, above, both; different codes over cells: two pictures, so +1 and -1
    assert np.allclose(standing, [[-1, -1, -1, 1], [1, 1, 1, -1]])


@pytest.mark.parametrize("paired", [False, True])
def test_the_statistic_against_a_double_loop(paired: bool) -> None:
    ours, theirs = pictures(5, 0), pictures(5, 1)
    kernel, n = _kernel(np.concatenate([ours, theirs])), 5
    total = 0.0
    for i in range(n):
        for j in range(n):
            if i != j:
                total += (kernel[i, j] + kernel[n + i, n + j]) / (n * (n - 1))
            if not paired:
                total -= 2 * kernel[i, n + j] / n**2
            elif i != j:
                total -= 2 * kernel[i, n + j] / (n * (n - 1))
    assert two_sample(ours, theirs, paired=paired, permutations=9).statistic == pytest.approx(total)


@pytest.mark.parametrize("paired", [False, True])
def test_p_values_under_one_law_are_uniform(paired: bool) -> None:
    from scipy import stats

    found = [
        two_sample(pictures(8, 2 * seed), pictures(8, 2 * seed + 1), paired=paired, permutations=99).p_value
        for seed in range(60)
    ]
    assert stats.kstest(found, "uniform").pvalue > 0.001 and min(found) < 0.3 < max(found)


@pytest.mark.parametrize("paired", [False, True])
def test_another_law_is_seen(paired: bool) -> None:
    assert two_sample(pictures(24, 0), pictures(24, 1, repeat=0.3), paired=paired).p_value < 0.01


def test_identical_pictures_differ_by_nothing() -> None:
    found = two_sample(pictures(9, 0), pictures(9, 0), paired=True)
    assert found.statistic == pytest.approx(0, abs=1e-12) and found.p_value == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [(pictures(5, 0), pictures(5, 0)[:, :4], "cannot be compared"), (pictures(3, 0), pictures(3, 0), "too few"),
     (pictures(5, 0), pictures(6, 0), "no pairs")],
)  # fmt: skip
def test_mistakes(ours: np.ndarray, theirs: np.ndarray, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        two_sample(ours, theirs, paired=True)


# ------------------------------------------------------------------------------- folders of the small random model


def evaluate(*words: object) -> Any:
    done = call("evaluate", *words, "--json")
    assert done.code == 0, done.err
    return done.record


def test_exact_methods_pass_and_lantern_does_not(folders: Path) -> None:
    """Same seeds: the very pictures. Other seeds: another picture of one law. LANTERN at a large delta: another law."""
    same = evaluate(folders / "exact", "--against", folders / "plain")
    assert (
        same["exact"] == {"pictures": 40, "identical": 40, "rate": 1.0, "equal_codes": 1.0} and same["test"]["p"] == 1
    )
    for name in ("other", "rejection"):
        found = evaluate(folders / name, "--against", folders / "plain")
        assert found["exact"]["identical"] == 0 and found["test"]["p"] > 0.01, name
    assert evaluate(folders / "lantern", "--against", folders / "plain")["test"]["p"] < 0.005


def test_pictures_are_joined_by_number(folders: Path, tmp_path: Path) -> None:
    """Files renamed, lines shuffled, some gone: what is left is joined right."""
    lines = [json.loads(line) for line in (folders / "plain" / "manifest.jsonl").read_text().splitlines()]
    kept = lines[::-1][:30]
    for place, line in enumerate(kept):
        (tmp_path / f"{place}.png").write_bytes((folders / "plain" / line["file"]).read_bytes())
        line["file"] = f"{place}.png"
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = evaluate(tmp_path, "--against", folders / "exact")
    assert found["exact"]["rate"] == 1 and (found["joined"], found["only_here"], found["only_there"]) == (30, 0, 10)
    kept[3]["index"], kept[4]["index"] = kept[4]["index"], kept[3]["index"]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    done = call("evaluate", tmp_path, "--against", folders / "exact")
    assert done.code == 2 and "compare folders of the same prompts" in done.err


def damage(row: dict[str, Any], **values: Any) -> str:
    return json.dumps({**row, **values}) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lambda row: "{", "line 1 of"),
        (lambda row: damage(row, index="1"), "line 1 of"),
        (lambda row: damage(row, file="../x.png"), "line 1 of"),
        (lambda row: damage(row, file="no.png"), "no.png, which is missing"),
        (lambda row: damage(row) * 2, "line 2 of"),
        (lambda row: "", "holds no pictures"),
        (lambda row: damage(row, index=999), "no picture numbers in common"),
        (lambda row: damage(row, codes=None), "holds no codes"),
        (lambda row: damage(row, codes={"rows": 1}), "are damaged"),
        (lambda row: damage(row), "too few"),
    ],
)
def test_manifests_that_cannot_be_read(text: Any, says: str, folders: Path, tmp_path: Path) -> None:
    row = json.loads((folders / "plain" / "manifest.jsonl").read_text().splitlines()[0])
    (tmp_path / row["file"]).write_bytes((folders / "plain" / row["file"]).read_bytes())
    (tmp_path / "manifest.jsonl").write_text(text(row))
    done = call("evaluate", tmp_path, "--against", folders / "exact", "--metrics", "test")
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1


def test_people_can_read_it(folders: Path) -> None:
    done = call("evaluate", folders / "exact", "--against", folders / "plain")
    assert "identical pictures: 40 of 40, 100.00 % of codes equal" in done.out and "no difference" in done.out
