"""Statistics of a model and its drafter: by hand, against real trees, and through the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import small
import sprites
import torch
from commands import call

from recipes.tiny import targets
from recipes.tiny.compose import Composer, Painter, Recipe
from recipes.tiny.multi_token_loss import Scorer
from underdraw import Pipeline
from underdraw.bench.acceptance import between_passes, by_depth, correlation, drawn, first_child, losses
from underdraw.bench.draft_probe import can_probe, probe
from underdraw.bench.presets import DEFAULT
from underdraw.history import History, StepResult, TokenStats
from underdraw.layout import Layout
from underdraw.plan import TreePlan

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(3, 4, range(100, 164))


def history(lengths: list[int]) -> History:
    """A picture of 3 x 4 codes whose passes accepted so many guesses."""
    made = History(LAYOUT)
    made.begin(100, TokenStats(2.0, 0.5))
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
    job = pipe.job("a red fox", seed=3, temperature=temperature)
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


def test_losses_of_a_random_model(tmp_path: Path) -> None:
    """It knows nothing, so captions and subjects make little difference, and a code costs about what guessing does."""
    pack = sprites.write(tmp_path / "pack.bin")
    model = Pipeline.from_pretrained(small.write(tmp_path / "model", side=32, drafter=False, length=99)).model
    found = losses(model, pack, 3)
    scenes = Composer(pack, "train", Recipe(), 2).draw(3, np.random.default_rng(1))
    texts = Composer(pack, "train", Recipe(), 2).captions(scenes)
    codes = model.image_tokenizer.encode(Painter(pack, "cpu", cell=2).paint(scenes)).flatten(1)
    with torch.no_grad():  # as training measures it
        ids = torch.tensor([model.make_prompt(text, None, model.sizes[0]).condition for text in texts])
        scored = Scorer(model.target.net, model.make_layout(model.sizes[0]), ids.shape[1])(ids, codes)
    assert found["train"]["loss"] == pytest.approx(float(scored.mean()), abs=2e-3)
    for split in ("train", "held-out"):
        assert found[split]["pictures"] == 3
        assert found[split]["loss"] == pytest.approx(found[split]["without_caption"], rel=0.1)
        assert 0.5 * np.log(small.IMAGES.codes) < found[split]["loss"] < 4 * np.log(small.IMAGES.codes)


def test_targets_by_hand() -> None:
    def entry(method: str, temperature: float, tau: float, speed: float, images: str = "4/4") -> dict[str, object]:
        spread = {"median": speed, "p10": speed - 0.4, "p90": speed + 1}
        return {
            "method": method, "temperature": temperature, "tau": tau, "speedup": spread, "equal_images": images,
        }  # fmt: skip

    summary = {"entries": [entry("AR", 1, 1, 1), entry(DEFAULT, 1.0, 3.6, 1.3), entry("chain", 0.0, 2, 1, "3/4")]}
    found = {(one["temperature"], one["what"].split(",")[0]): one for one in targets.checks(summary, [9.0, 16.0])}
    assert found["1", "tokens a pass"]["reached"] and not found["1", "speed-up over plain AR"]["reached"]
    assert not found["1", "never slower than plain AR"]["reached"] and found["1", "identical pictures"]["reached"]
    assert not found["0", "identical pictures"]["reached"] and found["0", "identical pictures"]["measured"] == "3"
    assert found["default", "seconds from the prompt to the saved picture"]["measured"] == "16.0 (9.0 to 16.0)"


def test_targets_in_one_command(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a trained drafter, with commands in this process."""
    model = small.write(tmp_path / "bare", side=3, drafter=False)

    def here(words: list[str]) -> None:
        if code := call(*words).code:
            raise SystemExit(code)

    monkeypatch.setattr(targets, "underdraw", here)
    given = ["--model", str(model), "--prompts", str(prompts), "--limit", "1", "--pictures", "1", "--repeats", "1"]
    targets.main([*given, "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "targets.json").read_text())
    same = [one for one in found["checks"] if one["what"].startswith("identical")]
    assert len(same) == 10 and all(one["reached"] for one in same) and found["settings"]["drafter"] == "jacobi"
    assert "seconds from the prompt to the saved picture" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        targets.main([*given, "--drafter", "nobody", "--out", str(tmp_path / "other")])


@pytest.mark.parametrize("page", ["src/underdraw/assets/tiny/README.md", "docs/lab.md"])
def test_pages_are_made_from_the_results(page: str) -> None:
    done = call("plot", "--page", ROOT / page, "--json")
    assert done.code == 0 and done.record["changed"] is False


def test_a_sheet_of_a_folder(small_model: Path, tmp_path: Path) -> None:
    from PIL import Image

    given = ["generate", "fox", "-m", small_model, "--seed", 1, "--quiet", "--tree", "none"]
    sheet = tmp_path / "sheet.jpg"
    assert call(*given, "--n", 3, "--out", tmp_path / "many", "--sheet", sheet).code == 0
    assert Image.open(sheet).format == "JPEG" and Image.open(sheet).width == 8 * 148
    assert "--sheet shows a folder" in call(*given, "--out", tmp_path / "x.png", "--sheet", sheet).err
    done = call(*given, "--n", 2, "--out", tmp_path / "other", "--sheet", tmp_path / "sheet.gif")
    assert done.code == 2 and ".jpg, .jpeg, .png" in done.err and not (tmp_path / "other").exists()
