"""The two-sample test: its formula against a double loop, its level and its power; exact match of folders and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call

from underdraw.errors import ConfigError
from underdraw.metrics.two_sample import _kernel, code_frequencies, pair_frequencies, pattern_shares, two_sample


def make_codes(count: int, seed: int, *, repeat: float = 0.0) -> np.ndarray:
    """Random codes; with probability `repeat` a cell copies its left neighbour."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 50, (count, 6, 6))
    for col in range(1, 6):
        copied = random.random((count, 6)) < repeat
        codes[:, :, col] = np.where(copied, codes[:, :, col - 1], codes[:, :, col])
    return codes.astype(np.int32)


def test_views_by_hand() -> None:
    codes = np.array([[[1, 1], [1, 2]], [[0, 0], [0, 0]]], dtype=np.int32)
    assert np.allclose(code_frequencies(codes) ** 2, [[0, 0.75, 0.25], [1, 0, 0]])
    assert np.allclose((pair_frequencies(codes) ** 2).sum(1), 2) and (pair_frequencies(codes)[0] > 0).sum() == 4
    shares = pattern_shares(codes)  # equal left, above, both; different codes: standardised, so +1 and -1
    assert np.allclose(shares, [[-1, -1, -1, 1], [1, 1, 1, -1]])


@pytest.mark.parametrize("paired", [False, True])
def test_the_statistic_against_a_double_loop(paired: bool) -> None:
    ours, theirs = make_codes(5, 0), make_codes(5, 1)
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
def test_p_values_of_equal_distributions_are_uniform(paired: bool) -> None:
    from scipy import stats

    p_values = [
        two_sample(make_codes(8, 2 * seed), make_codes(8, 2 * seed + 1), paired=paired, permutations=99).p_value
        for seed in range(60)
    ]
    assert stats.kstest(p_values, "uniform").pvalue > 0.001 and min(p_values) < 0.3 < max(p_values)


@pytest.mark.parametrize("paired", [False, True])
def test_another_distribution_is_detected(paired: bool) -> None:
    assert two_sample(make_codes(24, 0), make_codes(24, 1, repeat=0.3), paired=paired).p_value < 0.01


def test_identical_images_have_distance_zero() -> None:
    test = two_sample(make_codes(9, 0), make_codes(9, 0), paired=True)
    assert test.statistic == pytest.approx(0, abs=1e-12) and test.p_value == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [(make_codes(5, 0), make_codes(5, 0)[:, :4], "cannot be compared"), (make_codes(3, 0), make_codes(3, 0), "too few"),
     (make_codes(5, 0), make_codes(6, 0), "no pairs")],
)  # fmt: skip
def test_bad_inputs_are_refused(ours: np.ndarray, theirs: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        two_sample(ours, theirs, paired=True)


# ------------------------------------------------------------------------------- folders of the small random model


def evaluate(*words: object) -> Any:
    result = call("evaluate", *words, "--json")
    assert result.code == 0, result.err
    return result.record


def test_exact_methods_pass_and_lantern_does_not(folders: Path) -> None:
    """Same seeds: identical images. Other seeds: the same distribution. LANTERN at a large delta: another one."""
    same = evaluate(folders / "exact", "--against", folders / "plain")
    assert (
        same["exact"] == {"pictures": 40, "identical": 40, "rate": 1.0, "equal_codes": 1.0} and same["test"]["p"] == 1
    )
    for name in ("other", "rejection"):
        record = evaluate(folders / name, "--against", folders / "plain")
        assert record["exact"]["identical"] == 0 and record["test"]["p"] > 0.01, name
    assert evaluate(folders / "lantern", "--against", folders / "plain")["test"]["p"] < 0.005


def test_images_are_paired_by_index(folders: Path, tmp_path: Path) -> None:
    """Also if files are renamed, lines are shuffled and some are missing."""
    lines = [json.loads(line) for line in (folders / "plain" / "metadata.jsonl").read_text().splitlines()]
    kept = lines[::-1][:30]
    for number, line in enumerate(kept):
        (tmp_path / f"{number}.png").write_bytes((folders / "plain" / line["file_name"]).read_bytes())
        line["file_name"] = f"{number}.png"
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    record = evaluate(tmp_path, "--against", folders / "exact")
    assert record["exact"]["rate"] == 1 and (record["joined"], record["only_here"], record["only_there"]) == (30, 0, 10)
    kept[3]["index"], kept[4]["index"] = kept[4]["index"], kept[3]["index"]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    result = call("evaluate", tmp_path, "--against", folders / "exact")
    assert result.code == 2 and "compare folders of the same prompts" in result.err


def damage(row: dict[str, Any], **values: Any) -> str:
    return json.dumps({**row, **values}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda row: "{\n", "line 1 of"),
        (lambda row: damage(row, index="1"), "line 1 of"),
        (lambda row: damage(row, file_name="../x.png"), "line 1 of"),
        (lambda row: damage(row, file_name="no.png"), "no.png, which is missing"),
        (lambda row: damage(row) * 2, "too few"),
        (lambda row: "", "holds no images"),
        (lambda row: damage(row, index=999), "no image indices in common"),
        (lambda row: damage(row, codes=None), "hold no codes"),
        (lambda row: damage(row, codes={"rows": 1}), "are damaged"),
        (lambda row: damage(row), "too few"),
    ],
)
def test_damaged_manifests_are_refused(text: Any, message: str, folders: Path, tmp_path: Path) -> None:
    row = json.loads((folders / "plain" / "metadata.jsonl").read_text().splitlines()[0])
    (tmp_path / row["file_name"]).write_bytes((folders / "plain" / row["file_name"]).read_bytes())
    (tmp_path / "metadata.jsonl").write_text(text(row))
    result = call("evaluate", tmp_path, "--against", folders / "exact", "--metrics", "test")
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1


def test_output_for_people(folders: Path) -> None:
    result = call("evaluate", folders / "exact", "--against", folders / "plain")
    assert "identical images: 40 of 40, 100.00 % of codes equal" in result.out and "no difference" in result.out


def test_single_image_is_compared_exactly(folders: Path, tmp_path: Path) -> None:
    """A folder with one image is too small for the two-sample test, which is then skipped."""
    row = json.loads((folders / "plain" / "metadata.jsonl").read_text().splitlines()[0])
    (tmp_path / row["file_name"]).write_bytes((folders / "plain" / row["file_name"]).read_bytes())
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    record = evaluate(tmp_path, "--against", folders / "exact")
    assert record["exact"] == {"pictures": 1, "identical": 1, "rate": 1.0, "equal_codes": 1.0}
    assert "test" not in record and "at least 4" in record["test_skipped"]
    assert "two-sample test: skipped" in call("evaluate", tmp_path, "--against", folders / "exact").out


def test_image_files_are_compared_exactly(folders: Path, tmp_path: Path) -> None:
    files = sorted((folders / "plain").glob("*.png"))
    same = tmp_path / "copy.png"
    same.write_bytes(files[0].read_bytes())
    assert evaluate(files[0], "--against", same)["exact"] == {"pictures": 1, "identical": 1, "rate": 1.0}
    other = folders / "other" / files[0].name
    assert evaluate(files[0], "--against", other)["exact"]["identical"] == 0
    result = call("evaluate", files[0], "--against", files[1])
    assert result.code == 2 and "compare folders of the same prompts" in result.err
    same.write_bytes(b"half an image")
    result = call("evaluate", files[0], "--against", same)
    assert result.code == 2 and "cannot be read as an image" in result.err
