"""Training data: packs, the split by subject, captions, composition, the caption vocabulary, pinned packages."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from recipes.tiny import train_decoder as model_training
from recipes.tiny.collect import portrait_phrase
from recipes.tiny.compose import COLOURS, PALETTE, Composer, Painter, Recipe, Scenes, Sizes
from recipes.tiny.data import Pack, Picture, caption, is_held_out, pair_caption, write_pack
from recipes.tiny.emoji import noun_phrase
from recipes.tiny.lpips import _ArraysOnly
from recipes.tiny.multi_token_loss import Foresight, Scorer
from recipes.tiny.sources import PACKAGES, deb_members, fetch
from recipes.tiny.text import caption_texts, learn
from recipes.tiny.train_decoder import ModelTraining, initialise
from recipes.tiny.train_tokenizer import (
    SMOKE_ARCH,
    Evaluator,
    TokenizerTraining,
    Trainer,
    train,
    unsteadiness,
)
from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models.tiny import tiny_arch
from underdraw.nn.transformer import Transformer
from underdraw.nn.weights import load_weights, save_weights
from underdraw.tokenizers.fsq import FSQTokenizer, load_tokenizer, save_tokenizer
from underdraw.tokenizers.text import BOS, PAD, TextTokenizer
from underdraw.training.checkpoint import load_state

ROOT = Path(__file__).parents[2]
PX = 64
SUBJECTS = 80
STYLES = ("fluent-3d", "noto", "twemoji")


def webp(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()


def sprite(number: int) -> np.ndarray:
    """Left half one colour, right half another, fully opaque."""
    pixels = np.full((PX, PX, 4), 255, np.uint8)
    pixels[:, : PX // 2, :3] = (number * 3 % 256, 40, 200)
    pixels[:, PX // 2 :, :3] = (10, number * 7 % 256, 90)
    return pixels


def photo(number: int) -> np.ndarray:
    ramp = np.linspace(0, 255, PX, dtype=np.uint8)
    return np.stack(
        [np.tile(ramp, (PX, 1)), np.full((PX, PX), number * 11 % 256, np.uint8), np.tile(ramp, (PX, 1)).T], -1
    )


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    rows = []
    for style in STYLES:
        for number in range(SUBJECTS):
            group = "people" if number % 4 == 0 else "objects"
            picture = Picture(
                f"{style}/{number:03d}", "sprite", style, group, f"a thing{number}", f"emoji {number}", number % 2 == 0
            )
            rows.append((picture, webp(sprite(number))))
    for number in range(20):
        words = f"a person with hat {number}"
        portrait = Picture(f"micah/{number}", "portrait", "micah", "people", words, f"portrait {number}", True)
        rows.append((portrait, webp(sprite(number))))
        place = Picture(
            f"landscape/{number}", "landscape", "landscape", "travel-places", "a beach", f"land {number}", True
        )
        rows.append((place, webp(photo(number))))
        fruit = Picture(
            f"groceries/{number}", "photo", "groceries", "food-drink", "pears in a shop", f"fruit {number}", True
        )
        rows.append((fruit, webp(photo(number))))
    return Pack(write_pack(tmp_path_factory.mktemp("pack") / "pack.bin", PX, rows))


@pytest.fixture(scope="module")
def painter(pack: Pack) -> Painter:
    return Painter(pack, "cpu")


def test_pack_round_trip(pack: Pack) -> None:
    assert len(pack) == SUBJECTS * len(STYLES) + 60 and pack.px == PX
    row = next(row for row, picture in enumerate(pack.pictures) if picture.key == "noto/005")
    assert pack.pictures[row].subject == "emoji 5" and pack.pictures[row].flippable is False
    assert np.array_equal(pack.pixels([row])[0], sprite(5))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(pack.webp(row))).convert("RGBA")), sprite(5))
    thin = pack.thinned(7)
    assert [picture.key for picture in thin.pictures] == [picture.key for picture in pack.pictures[::7]]
    assert np.array_equal(thin.pixels([3])[0], pack.pixels([21])[0])


def test_bad_packs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training pack"):
        Pack(tmp_path / "missing.bin")
    (tmp_path / "junk.bin").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="not a training pack"):
        Pack(tmp_path / "junk.bin")
    picture = Picture("noto/1", "sprite", "noto", "objects", "a thing", "emoji 1", True)
    with pytest.raises(ConfigError, match="two pictures have the key 'noto/1'"):
        write_pack(tmp_path / "twice.bin", PX, [(picture, b"a"), (picture, b"b")])


def test_split_is_by_subject_and_stable(pack: Pack) -> None:
    train, held_out = pack.indices("train"), pack.indices("held-out")
    assert len(held_out) and len(train) + len(held_out) == len(pack)
    subjects = {pack.pictures[row].subject for row in train}
    assert subjects.isdisjoint(pack.pictures[row].subject for row in held_out)
    assert is_held_out("emoji moose") and not is_held_out("emoji fox")  # must never change: weights depend on it
    share = np.mean([is_held_out(f"subject {number}") for number in range(4000)])
    assert 0.015 < share < 0.035


def test_captions_say_what_is_seen() -> None:
    fox = Picture("fluent-3d/1f98a", "sprite", "fluent-3d", "animals-nature", "a fox", "emoji fox", True)
    owl = dataclasses.replace(fox, phrase="an owl")
    beach = Picture("landscape/beach0", "landscape", "landscape", "travel-places", "a beach", "landscape beach0", True)
    assert caption(fox, "on a sky blue background") == "a fox, 3D render, on a sky blue background"
    assert caption(fox) == "a fox, 3D render"
    assert caption(fox, "on a red background", style="implied") == "a fox on a red background"
    assert caption(fox, style="implied") == "a fox"
    assert caption(beach) == "a photo of a beach"
    assert pair_caption(fox, owl, "on an orange background") == (
        "a fox on the left and an owl on the right, 3D render, on an orange background"
    )


@pytest.mark.parametrize(
    ("label", "phrase"),
    [
        ("fox", "a fox"),
        ("octopus", "an octopus"),
        ("butterfly", "a butterfly"),
        ("butter", "butter"),
        ("unicorn", "a unicorn"),
        ("umbrella with rain drops", "an umbrella with rain drops"),
        ("cherries", "cherries"),
        ("cactus", "a cactus"),
        ("automobile", "a car"),
        ("man: bald", "a bald man"),
        ("woman: dark skin tone, curly hair", "a woman with dark skin tone and curly hair"),
        ("man: light skin tone, beard", "a man with light skin tone and a beard"),
    ],
)
def test_noun_phrases(label: str, phrase: str) -> None:
    assert noun_phrase(label) == phrase


def test_portrait_phrase_names_what_was_drawn() -> None:
    drawn = {
        "baseColor": "#f9c9b6",
        "hair": "fonze",
        "hairColor": "#000000",
        "glasses": "round",
        "shirtColor": "#fc909f",
    }
    assert portrait_phrase("micah", drawn) == "a person with light skin, black quiff, glasses and a pink shirt"


def test_sizes_of_the_usual_canvas() -> None:
    assert Sizes.of(192) == Sizes(192, 160, 128, 88, 8)
    with pytest.raises(ConfigError, match="not a multiple"):
        Sizes.of(100)


def test_sprites_stand_on_whole_cells_inside_the_canvas(pack: Pack) -> None:
    scenes = Composer(pack).draw(2000, np.random.default_rng(0))
    there = scenes.rows >= 0
    for values in (scenes.sizes, scenes.x, scenes.y):
        assert (values[there] % 8 == 0).all() and (values[there] >= 0).all()
    assert (scenes.x + scenes.sizes <= PX)[there].all() and (scenes.y + scenes.sizes <= PX)[there].all()
    pair = there[:, 1]
    assert 0.05 < pair.mean() < 0.15
    assert (scenes.x[pair, 0] + scenes.sizes[pair, 0] <= scenes.x[pair, 1]).all()  # side by side, left one first
    assert (scenes.rows[pair, 0] != scenes.rows[pair, 1]).all()
    main = there[:, 0] & ~pair & (scenes.sizes[:, 0] == Sizes.of(PX).main)
    assert main.mean() > 0.5  # one main size, and then always in the same place
    assert len(np.unique(np.stack([scenes.x[main, 0], scenes.y[main, 0]]), axis=1).T) == 1


def test_composer_keeps_to_its_split_and_seed(pack: Pack) -> None:
    held_out = set(pack.indices("held-out").tolist())
    for split in ("train", "held-out"):
        scenes = Composer(pack, split).draw(500, np.random.default_rng(3))
        drawn = set(scenes.rows[scenes.rows >= 0].tolist())
        assert drawn.issubset(held_out) is (split == "held-out")
        assert drawn.isdisjoint(held_out) is (split == "train")
        again = Composer(pack, split).draw(500, np.random.default_rng(3))
        assert all(
            np.array_equal(getattr(scenes, item.name), getattr(again, item.name)) for item in dataclasses.fields(Scenes)
        )


def test_people_are_drawn_less_often(pack: Pack) -> None:
    def share(recipe: Recipe) -> float:
        rows = Composer(pack, recipe=recipe).draw(4000, np.random.default_rng(0)).rows[:, 0]
        return float(np.mean([pack.pictures[row].group == "people" for row in rows if row >= 0]))

    plain = Recipe(people_weight=1.0, portrait_weight=1.0)
    assert share(Recipe(people_weight=0.25, portrait_weight=0.25)) < 0.5 * share(plain)


def one_scene(row: int, size: int, x: int, top: str, bottom: str, flip: bool = False) -> Scenes:
    def pair(first: int, second: int) -> np.ndarray:
        return np.array([[first, second]])

    no = np.array([False])
    return Scenes(
        np.array([COLOURS.index(top)]), np.array([COLOURS.index(bottom)]), np.array([-1]), no,
        np.array([[1.0, 0.0, 0.0]]), no, pair(row, -1), pair(size, 0), pair(x, 0), pair(8, 0),
        pair(flip, False).astype(bool), no, no,
    )  # fmt: skip


def test_photographs_are_seen_in_part_flipped_and_out_of_focus(pack: Pack, painter: Painter) -> None:
    """At scale 1 a photograph is the stored one; at scale 2 a corner of it, magnified; soft ones lose detail only."""
    row = int(pack.indices("all", "landscape")[0])
    stored = torch.from_numpy(pack.pixels([row])[0, ..., :3]).movedim(-1, 0) / 127.5 - 1
    plain = dataclasses.replace(one_scene(-1, 0, 0, "red", "red"), backdrop=np.array([row]))

    def shown(**changes: np.ndarray) -> Tensor:
        return painter.paint(dataclasses.replace(plain, **changes))[0]

    yes = np.array([True])
    torch.testing.assert_close(shown(), stored, atol=1e-4, rtol=0)
    torch.testing.assert_close(shown(backdrop_flip=yes), stored.flip(-1), atol=1e-4, rtol=0)
    half = PX // 2
    corner = shown(backdrop_view=np.array([[2.0, 1.0, 0.0]]))  # the upper right quarter
    smaller = torch.nn.functional.avg_pool2d(corner, 2)
    torch.testing.assert_close(smaller[:, 1:-1, 1:-1], stored[:, :half, half:][:, 1:-1, 1:-1], atol=0.2, rtol=0)
    soft = shown(backdrop_soft=yes)
    assert soft.std() <= stored.std() and (soft.mean() - stored.mean()).abs() < 0.02


def test_painter_puts_colours_and_sprites_where_they_belong(pack: Pack, painter: Painter) -> None:
    row = next(row for row, picture in enumerate(pack.pictures) if picture.key == "noto/005")
    size = Sizes.of(PX).small
    for flip in (False, True):
        image = painter.paint(one_scene(row, size, 16, "red", "red", flip))[0]  # (3, PX, PX)
        image = ((image + 1) * 127.5).round().to(torch.int64)
        red = torch.tensor(PALETTE["red"])
        assert torch.equal(image[:, 7, 20], red) and torch.equal(image[:, 20, 15], red)
        assert torch.equal(image[:, 20, 16 + size], red)
        left, right = torch.tensor([15, 40, 200]), torch.tensor([10, 35, 90])
        assert torch.equal(image[:, 20, 18], right if flip else left)
        assert torch.equal(image[:, 20, 16 + size - 2], left if flip else right)


def test_gradients_run_from_top_to_bottom(pack: Pack, painter: Painter) -> None:
    image = painter.paint(one_scene(-1, 0, 0, "white", "black"))[0]
    image = ((image + 1) * 127.5).round().to(torch.int64)
    assert torch.equal(image[:, 0, 5], torch.tensor(PALETTE["white"]))
    assert torch.equal(image[:, -1, 5], torch.tensor(PALETTE["black"]))
    assert (image[0, 1:, 0] <= image[0, :-1, 0]).all()


def test_flips_spare_what_must_not_be_mirrored(pack: Pack) -> None:
    scenes = Composer(pack, recipe=Recipe(flip=1.0)).draw(1000, np.random.default_rng(0))
    for slot in (0, 1):
        there = scenes.rows[:, slot] >= 0
        flippable = np.array([pack.pictures[row].flippable for row in scenes.rows[there, slot]])
        assert np.array_equal(scenes.flips[there, slot], flippable)
    assert not Composer(pack).draw(1000, np.random.default_rng(0)).flips.any()


def test_captions_match_the_painted_background(pack: Pack, painter: Painter) -> None:
    composer = Composer(pack)
    scenes = composer.draw(300, np.random.default_rng(5))
    pixels = ((painter.paint(scenes) + 1) * 127.5).round()
    checked = 0
    for place, text in enumerate(composer.captions(scenes)):
        corner = tuple(pixels[place, :, 0, PX // 2].int().tolist())  # above every sprite
        named = re.search(r"\bon an? ([a-z ]+) background$", text)
        if named and "gradient" not in text and scenes.sizes[place, 0] < PX:
            assert corner == PALETTE[named.group(1)], text
            checked += 1
    assert checked > 50
    assert all(
        text.startswith("a photo of")
        for text, row in zip(composer.captions(scenes), scenes.rows, strict=True)
        if row[0] < 0
    )


def test_recipe_chances_are_checked() -> None:
    with pytest.raises(ConfigError, match="may not exceed 1"):
        Recipe(white=0.8, gradient=0.3)


def test_vocabulary_round_trip(pack: Pack, tmp_path: Path) -> None:
    tokenizer = learn(caption_texts(pack), size=600, merges=100)
    assert tokenizer.size <= 600
    long = TextTokenizer(tokenizer.merges, tokenizer.words, 999)
    composer = Composer(pack)
    for text in composer.captions(composer.draw(50, np.random.default_rng(0))):
        assert tokenizer.decode(long.encode(text)) == text.lower()
    assert len(tokenizer.encode("a thing3, 3D render, on a white background")) == 11  # known words are whole tokens
    assert len(tokenizer.encode("an unheard-of word")) > 5  # others are spelled
    wild = "狐狸 🦊 ÉCLAIR, zażółć\tgęślą"
    assert long.decode(long.encode(wild)) == ("狐狸 🦊 éclair, zażółć gęślą")
    assert tokenizer.encode("  A   Fox ") == tokenizer.encode("a fox")
    tokenizer.save(tmp_path / "text.json")
    again = TextTokenizer.load(tmp_path / "text.json")
    assert again.encode("a fox on a red background") == tokenizer.encode("a fox on a red background")
    with pytest.raises(CheckpointError, match="could be read"):
        TextTokenizer.load(tmp_path / "missing.json")


def test_prompts_are_cut_and_padded() -> None:
    tokenizer = TextTokenizer([], max_length=6)
    assert tokenizer.encode("abcdefgh") == [BOS, 2 + 32, 2 + 97, 2 + 98, 2 + 99, 2 + 100]
    left, right = tokenizer.encode_batch(["a", ""]), tokenizer.encode_batch(["a", ""], side="right")
    assert left == [[PAD, PAD, PAD, BOS, 34, 99], [PAD] * 5 + [BOS]]
    assert right == [[BOS, 34, 99, PAD, PAD, PAD], [BOS] + [PAD] * 5]


def test_packages_are_pinned_and_checked(tmp_path: Path) -> None:
    assert len({package.filename for package in PACKAGES.values()}) == len(PACKAGES)
    assert all(len(package.sha256) == 64 for package in PACKAGES.values())
    (tmp_path / PACKAGES["noto"].filename).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="delete the file"):
        fetch("noto", tmp_path)


def test_debian_packages_are_read_without_dpkg(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, content in (("./usr/a.jpg", b"picture"), ("./usr/b.txt", b"words")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", buffer.getvalue())):  # an odd length first
        raw += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )
    (tmp_path / "x.deb").write_bytes(raw)
    assert list(deb_members(tmp_path / "x.deb", lambda name: name.endswith("jpg"))) == [("./usr/a.jpg", b"picture")]


def test_lpips_pickle_may_hold_arrays_only() -> None:
    array = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert np.array_equal(_ArraysOnly(io.BytesIO(pickle.dumps(array, protocol=4))).load()["kernel"], array["kernel"])
    with pytest.raises(CheckpointError, match="refused"):
        _ArraysOnly(io.BytesIO(pickle.dumps(Path("x")))).load()


def test_tokenizer_training_learns_and_continues(pack: Pack, painter: Painter, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = TokenizerTraining(
        seconds=1.0, batch=4, held_out=8, warmup=2, learning_rate=4e-3, evaluate_every=0.5, compile="off"
    )
    evaluator = Evaluator(pack, painter, None, options.held_out)
    trainer = Trainer(FSQTokenizer(SMOKE_ARCH), Composer(pack), painter, None, options)
    before = evaluator.measure(trainer.average)
    out = tmp_path / "tokenizer"
    after = train(trainer, evaluator, out)
    assert after.psnr > before.psnr and 0 <= after.kept <= 1
    assert (out / "sheet.png").exists()
    model, known = load_tokenizer(out)
    assert known == {"step": trainer.steps, "seconds": round(trainer.seconds)}
    state = load_state(out)
    assert state is not None
    resumed = Trainer(model, Composer(pack), painter, None, options)
    resumed.restore(state)
    train(resumed, evaluator, out)
    assert resumed.steps == trainer.steps  # the budget was spent, so nothing more was trained
    for one, other in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    trainer.step(1.0)
    resumed.step(1.0)
    moved = zip(trainer.optimizer.state.values(), resumed.optimizer.state.values(), strict=True)
    assert all(one["step"] == other["step"] == trainer.steps for one, other in moved)  # the moments went on


def test_weights_of_other_levels_are_a_start(pack: Pack, tmp_path: Path) -> None:
    """A tokenizer takes over all weights; a model's new codes start as the nearest old ones."""
    text = learn(caption_texts(pack), size=400)
    old = FSQTokenizer(SMOKE_ARCH)
    new = FSQTokenizer(dataclasses.replace(SMOKE_ARCH, levels=(4, 3, 3, 3)))
    new.load_state_dict(old.state_dict())
    save_tokenizer(tmp_path / "tokenizer", old, {})
    nets = [Transformer(tiny_arch(text.size, tokenizer.arch.codes, dim=64, layers=1)) for tokenizer in (old, new)]
    initialise(nets[0], 0)
    save_weights(tmp_path / "decoder", nets[0].state_dict(), {}, "bf16")
    model_training.inherit(nets[1], tmp_path, new.codebook, text.size)
    first, last = new.codebook[0], new.codebook[-1]  # the corners of the box are in both codebooks
    assert torch.equal(first, old.codebook[0]) and torch.equal(last, old.codebook[-1])
    for name in ("embedding.weight", "head.weight"):
        mine, theirs = (dict(net.named_parameters())[name].detach() for net in reversed(nets))
        assert torch.equal(mine[-1], theirs[-1].bfloat16().float())
    assert torch.equal(nets[1].embedding.weight[: text.size], nets[0].embedding.weight[: text.size].bfloat16().float())


def test_unsteadiness_counts_what_it_says(pack: Pack) -> None:
    """Distance from a level, from like neighbours and from the twin; nothing else, and zero for steady codes."""
    pixels = torch.zeros(2, 3, 16, 16)
    pixels[:, :, :8, :8] = 1.0  # one cell differs from the other three
    latents = torch.tensor([[5.0, 2.0], [2.0, 2.0]])[None, ..., None].repeat(2, 1, 1, 1)
    assert unsteadiness(latents, pixels, 8).item() == 0
    off = latents + 0.25
    assert unsteadiness(off, pixels, 8).item() == pytest.approx(0.25**2)
    moved = latents.clone()
    moved[:, 0, 1] = 4.0  # its like is the cell below it, one of the two that have one; the twin moves along
    assert unsteadiness(moved, pixels, 8).item() == pytest.approx((4 - 2) ** 2)
    apart = latents.clone()
    apart[0, 0, 0] = 7.0  # alike to nobody but its twin, one of four cells
    assert unsteadiness(apart, pixels, 8).item() == pytest.approx((7 - 5) ** 2 / 4)


def test_foresight_tells_the_codes_after_the_next(pack: Pack) -> None:
    """With matrices of zeros, a loss ahead is that of the next code's own logits against later codes."""
    layout = Layout(2, 3, range(5, 13))
    net = Transformer(tiny_arch(5, 8, dim=64, layers=1))
    initialise(net, 0)
    scorer = Scorer(net, layout, 2)
    text, codes = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3, 2]])
    plain, ahead = Foresight(scorer, 3)(text, codes, torch.tensor([2]))
    assert plain.item() == pytest.approx(scorer(text, codes).mean().item())
    logits = net.logits(scorer.features(text, codes))[:, :-2]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 2:].flatten())
    assert ahead.item() == pytest.approx(wanted.item())


@pytest.mark.parametrize("foresight", [0, 8])
def test_model_training_learns_saves_and_draws(foresight: int, pack: Pack, painter: Painter, tmp_path: Path) -> None:
    """A few steps lower the loss, the folder it writes loads again, and the engine draws a sheet from it."""
    text = learn(caption_texts(pack), size=400)
    tokenizer = FSQTokenizer(SMOKE_ARCH)
    side = PX // tokenizer.downsample
    layout = Layout(side, side, range(text.size, text.size + tokenizer.arch.codes))
    net = Transformer(tiny_arch(text.size, tokenizer.arch.codes, dim=64, layers=1))
    initialise(net, 0)
    options = ModelTraining(
        seconds=1.0, batch=4, warmup=2, learning_rate=3e-3, evaluated=4, report_every=0.5, foresight=foresight
    )
    composer = Composer(pack)
    trainer = model_training.Trainer(net, layout, text, tokenizer, painter, composer, options)
    before = trainer.evaluate(composer, 4, rivals=2)["loss"]
    model_training.train(trainer, tmp_path, Composer(pack, "held-out"), ["a thing1"])
    assert trainer.evaluate(composer, 4, rivals=2)["loss"] < before
    assert (tmp_path / "sheet-g3-k256.png").exists()
    state, about = load_weights(tmp_path)
    again = Transformer(tiny_arch(about["arch"]["text"], about["arch"]["codes"], dim=64, layers=1))
    again.load_state_dict(state)
    assert about["progress"]["steps"] == trainer.steps


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("train_tokenizer", ["--pack", "missing.bin", "--out", "out"]),
        ("train_decoder", ["--pack", "missing.bin", "--out", "out", "--tokenizer", "missing"]),
        ("text", ["--pack", "missing.bin", "--out", "out.json"]),
        ("train_tokenizer", ["--pack", "missing.bin", "--out", "out", "--secnds", "3"]),
    ],
)
def test_a_wrong_command_is_one_sentence_and_leaves_nothing(module: str, options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"recipes.tiny.{module}", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error:" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
