"""`underdraw generate` does what its help says."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_checkpoint
from commands import call
from PIL import Image
from tqdm import tqdm

from underdraw import Pipeline
from underdraw.cli.app import main

QUICK = ("--tree", "chain:depth=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pixels(path: Path) -> bytes:
    return Image.open(path).tobytes()


def test_single_image(small_model: Path, folder: Path) -> None:
    done = call("generate", "a red fox", "-m", small_model, "-o", "fox.png", "--seed", 7)
    assert done.code == 0 and done.err == ""
    (line,) = done.out.splitlines()
    assert line.startswith("fox.png: ") and "passes" in line and "tokens per pass" in line and "seed 7" in line
    picture = Image.open("fox.png")
    assert picture.size == (small_checkpoint.PIXELS, small_checkpoint.PIXELS) and np.asarray(picture).std() > 1
    assert sorted(path.name for path in folder.iterdir()) == ["fox.png"]


def test_json_record(small_model: Path, folder: Path) -> None:
    tree = ("--tree", "confidence:nodes=16,depth=4,top_k=4")
    done = call("generate", "a red fox", "-m", small_model, "-o", "a.png", "--seed", 7, "--json", "--compare", *tree)
    record = done.record
    for key in ("seconds", "passes", "tokens", "tokens_per_pass", "mean_depth", "speedup", "identical"):
        assert key in record
    assert record["identical"] is True and record["tokens"] == record["plain_passes"] == small_checkpoint.TOKENS
    assert record["tokens_per_pass"] == pytest.approx(small_checkpoint.TOKENS / record["passes"], abs=1e-3)
    assert record["passes"] < small_checkpoint.TOKENS
    assert record["load"]["seconds"] > 0 and 10**4 < record["load"]["weight_bytes"] < 10**7
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"], rel=0.01)
    assert record["pass_ms"] > 0 and record["plain_pass_ms"] > 0


def test_without_compare_nothing_is_compared(small_model: Path, folder: Path) -> None:
    record = call("generate", "a red fox", "-m", small_model, "-o", "a.png", "--json", *QUICK).record
    assert "speedup" not in record and "identical" not in record


def test_other_pixels_are_not_called_identical(small_model: Path, folder: Path) -> None:
    """`identical` can be false: the verifier `rejection` samples another image."""
    arguments = ("-m", small_model, "-o", "a.png", "--seed", 7, "--verifier", "rejection", "--compare", "--json")
    assert call("generate", "a red fox", *arguments, "--tree", "chain:depth=3").record["identical"] is False


def test_metadata_reproduces_the_image(small_model: Path, folder: Path) -> None:
    call("generate", "ein Fuchs, 狐 🦊", "-m", small_model, "-o", "a.png", "--temperature", 0.8, "--top-k", 99)
    text = Image.open("a.png").text  # type: ignore[attr-defined]
    assert text["prompt"] == "ein Fuchs, 狐 🦊" and text["model"] == str(small_model)
    settings = json.loads(text["settings"])
    assert settings["temperature"] == 0.8 and settings["top_k"] == 99 and settings["guidance"] > 1
    again = [
        word for key in ("temperature", "top_k", "guidance") for word in (f"--{key}".replace("_", "-"), settings[key])
    ]
    again += ["--seed", text["seed"]]
    call("generate", text["prompt"], "-m", text["model"], "-o", "b.png", *again, *QUICK)
    assert pixels(folder / "a.png") == pixels(folder / "b.png")


def test_default_name_is_prompt_and_seed(small_model: Path, folder: Path) -> None:
    assert call("generate", "A red/fox: 狐!", "-m", small_model, "--seed", 3, "--quiet", *QUICK).out == ""
    assert [path.name for path in folder.iterdir()] == ["a-red-fox-狐-3.png"]


def test_random_seed_is_reported(small_model: Path, folder: Path) -> None:
    records = [call("generate", "fox", "-m", small_model, "-o", f"{i}.png", "--json", *QUICK).record for i in range(2)]
    seeds = [record["seed"] for record in records]
    assert seeds[0] != seeds[1]
    call("generate", "fox", "-m", small_model, "-o", "again.png", "--seed", seeds[0], *QUICK)
    assert pixels(folder / "0.png") == pixels(folder / "again.png") != pixels(folder / "1.png")


def test_force_replaces(small_model: Path, folder: Path) -> None:
    (folder / "a.png").write_text("old")
    assert call("generate", "fox", "-m", small_model, "-o", "a.png", "--force", *QUICK).code == 0
    assert Image.open("a.png").size == (small_checkpoint.PIXELS, small_checkpoint.PIXELS)


def test_sheets(small_model: Path, folder: Path) -> None:
    arguments = ("-o", "a.png", "--heatmap", "heat.png", "--compare-image", "both.png", "--json")
    record = call("generate", "fox", "-m", small_model, *arguments).record
    assert record["identical"] is True and record["heatmap"] == "heat.png" and record["compare_image"] == "both.png"
    heat, both = Image.open("heat.png"), Image.open("both.png")
    assert heat.width > 4 * 288 and both.width > 2 * 288
    left, right = (np.asarray(both.crop((x, 80, x + 288, 300))) for x in (16, 320))
    assert np.array_equal(left, right) and left.std() > 1


def test_several_images_of_one_prompt(small_model: Path, folder: Path) -> None:
    record = call("generate", "fox", "-m", small_model, "--n", 3, "-o", "foxes", "--seed", 5, "--json", *QUICK).record
    assert record["images"] == record["drawn"] == 3 and record["tokens"] == 3 * small_checkpoint.TOKENS
    rows = [json.loads(line) for line in Path("foxes/metadata.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [5, 6, 7] and len(
        {pixels(folder / "foxes" / r["file_name"]) for r in rows}
    ) == 3
    out = Pipeline.from_pretrained(small_model)("fox", num_images_per_prompt=3, seed=5)
    assert [image.tobytes() for image in out.images] == [pixels(folder / "foxes" / row["file_name"]) for row in rows]


def test_batch_size_does_not_change_images(small_model: Path, folder: Path) -> None:
    Path("prompts.txt").write_text("a red fox\n\na blue house\n  a tree \n", encoding="utf-8")
    common = ("--prompts", "prompts.txt", "-m", small_model, "--seed", 1, "--n", 2, "--compare", "--json", *QUICK)
    single = call("generate", *common, "-o", "one").record
    batched = call("generate", *common, "-o", "four", "--batch", 4).record
    assert single["identical"] is True and batched["identical"] is True and single["passes"] == batched["passes"]
    names = [f"{index:05d}.png" for index in range(6)]
    assert [pixels(folder / "one" / name) for name in names] == [pixels(folder / "four" / name) for name in names]
    assert json.loads(Path("one/metadata.jsonl").read_text().splitlines()[4])["prompt"] == "a tree"


def test_published_sets(small_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["Prompt\tCategory\tChallenge\tNote", "bond\tAbstract\tBasic\tB", 'the word "fox"\tAbstract\tBasic\tB', ""]
    (folder / "PartiPrompts.tsv").write_text("\n".join(rows))
    captions = [(7, 3, "second of 7"), (2, 9, "of 2"), (7, 1, "first of 7 ")]
    keys = ("image_id", "id", "caption")
    document = {"annotations": [dict(zip(keys, row, strict=True)) for row in captions]}
    (folder / "annotations").mkdir()
    (folder / "annotations" / "captions_val2017.json").write_text(json.dumps(document))
    call("generate", "--prompts", "parti", "--data", folder, "-m", small_model, "-o", "p", "--tree", "none")
    monkeypatch.setenv("UNDERDRAW_DATA", str(folder))
    call("generate", "--prompts", "coco", "-m", small_model, "-o", "c", "--limit", 2, "--tree", "none")
    prompts = [
        [json.loads(line)["prompt"] for line in Path(name, "metadata.jsonl").read_text().splitlines()] for name in "pc"
    ]
    assert prompts == [["bond", 'the word "fox"'], ["of 2", "first of 7"]]


def test_overlong_prompts_can_be_skipped(small_model: Path, folder: Path) -> None:
    Path("p.txt").write_text("fox\n" + "fox " * 99 + "\nblue\n")
    common = ("--prompts", "p.txt", "-m", small_model, "--seed", 3, "--tree", "none", "--json")
    record = call("generate", *common, "-o", "p", "--overlong", "skip").record
    assert (record["images"], record["skipped"]) == (2, 1)
    rows = [json.loads(line) for line in Path("p/metadata.jsonl").read_text().splitlines()]
    assert [(row["index"], row["seed"]) for row in rows] == [(0, 3), (2, 5)]  # skipping moves no seed
    (skipped,) = [json.loads(line) for line in Path("p/failed.jsonl").read_text().splitlines()]
    assert skipped["index"] == 1 and skipped["permanent"] and "shorten it" in skipped["reason"]


@pytest.mark.parametrize("prompt", ["狐", "лиса", "ثعلب", "🦊", "लोमड़ी", "zorro\t¿rojo?", "-- --fox"])
def test_prompts_in_any_script(small_model: Path, folder: Path, prompt: str) -> None:
    done = call("generate", "-m", small_model, "-o", "a.png", "--tree", "none", "--", prompt)
    assert done.code == 0, done.err
    assert Image.open("a.png").text["prompt"] == prompt  # type: ignore[attr-defined]


def test_sheet_shows_all_images_of_a_folder(small_model: Path, folder: Path) -> None:
    command = ["generate", "fox", "-m", small_model, "--seed", 1, "--quiet", "--tree", "none"]
    assert call(*command, "--n", 3, "--out", "many", "--sheet", "sheet.jpg").code == 0
    assert Image.open("sheet.jpg").format == "JPEG" and Image.open("sheet.jpg").width == 8 * 148
    assert "--sheet is for many images" in call(*command, "--out", "x.png", "--sheet", "sheet.jpg").err
    done = call(*command, "--n", 2, "--out", "other", "--sheet", "sheet.gif")
    assert done.code == 2 and ".jpg, .jpeg, .png" in done.err and not Path("other").exists()


def test_version_and_help() -> None:
    assert call("--version").out.strip().count(".") == 2
    assert call("--help").code == call("generate", "-h").code == call().code == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("options", "seen"), [((), True), (("--json",), False), (("--quiet",), False)])
def test_progress_bar_counts_tokens(
    small_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], seen: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a bar waits a while before it shows
    assert main(["generate", "fox", "-m", str(small_model), "-o", "a.png", *QUICK, *options]) == 0
    shown = terminal.getvalue()
    assert (f"0/{small_checkpoint.TOKENS}" in shown) == seen and ("tokens/pass" in shown) == seen
    assert ("loading" in shown) == seen


def test_compare_shows_one_bar_at_a_time(small_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars of the pipelines are off, for plain sampling too."""
    labels = []

    class RecordedBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            if not self.disable:
                labels.append(settings.get("desc"))

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("tqdm.tqdm", RecordedBar)
    assert main(["generate", "fox", "-m", str(small_model), "-o", "a.png", "--compare", *QUICK]) == 0
    assert labels == [None, "plain"]
