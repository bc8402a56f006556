"""Composed training images: sizes and positions, splits, colours, photographs, captions."""

from __future__ import annotations

import copy
import dataclasses
import re

import numpy as np
import pytest
import torch
from sprite_pack import PX
from torch import Tensor

from recipes.tiny.compose import TURNS, Composer, SceneConfig, Scenes, SpriteSizes
from recipes.tiny.data import Pack
from recipes.tiny.paint import Painter
from recipes.tiny.palette import COLOURS, PALETTE, SPRITE_COLOURS, describe
from underdraw.errors import ConfigError


def to_bytes(pixels: Tensor) -> Tensor:
    """Pixels in [-1, 1] as 0..255."""
    return ((pixels + 1) * 127.5).round().to(torch.int64)


def one_scene(row: int, size: int, x: int, top: str, bottom: str, flip: bool = False) -> Scenes:
    """A sprite, or none for row -1, at (x, 8)."""

    def slots(first: int, second: int) -> np.ndarray:
        return np.array([[first, second]])

    no = np.array([False])
    return Scenes(
        np.array([COLOURS.index(top)]), np.array([COLOURS.index(bottom)]), np.array([-1]), no,
        np.array([[1.0, 0.0, 0.0]]), no, slots(row, -1), slots(size, 0), slots(x, 0), slots(8, 0),
        slots(flip, False).astype(bool), np.zeros((1, 2)), slots(-1, -1), no, no, no, no, no,
    )  # fmt: skip


def test_sizes_of_the_usual_canvas() -> None:
    assert SpriteSizes.for_canvas(192) == SpriteSizes(192, 176, 160, 128, 88, 8)
    with pytest.raises(ConfigError, match="not a multiple"):
        SpriteSizes.for_canvas(100)


def test_sprites_are_aligned_to_cells_inside_the_canvas(pack: Pack) -> None:
    scenes = Composer(pack).draw(2000, np.random.default_rng(0))
    has_sprite = scenes.rows >= 0
    for values in (scenes.sizes, scenes.x, scenes.y):
        assert (values[has_sprite] % 8 == 0).all() and (values[has_sprite] >= 0).all()
    assert (scenes.x + scenes.sizes <= PX)[has_sprite].all() and (scenes.y + scenes.sizes <= PX)[has_sprite].all()
    is_pair = has_sprite[:, 1]
    assert 0.05 < is_pair.mean() < 0.15
    assert (scenes.x[is_pair, 0] + scenes.sizes[is_pair, 0] <= scenes.x[is_pair, 1]).all()  # the first is on the left
    assert (scenes.rows[is_pair, 0] != scenes.rows[is_pair, 1]).all()
    sizes = SpriteSizes.for_canvas(PX)
    is_single = has_sprite[:, 0] & ~is_pair & (scenes.sizes[:, 0] < PX)  # portraits fill the canvas
    for size in (sizes.large, sizes.main, sizes.medium, sizes.small):
        corners = np.stack([scenes.x, scenes.y])[:, is_single & (scenes.sizes[:, 0] == size), 0]
        assert corners.shape[1] > 50 and len(np.unique(corners, axis=1).T) >= 4  # every size at several positions


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_composer_keeps_to_its_split_and_seed(split: str, pack: Pack) -> None:
    held_out = set(pack.indices("held-out").tolist())
    scenes, again = (Composer(pack, split).draw(500, np.random.default_rng(3)) for _ in range(2))  # type: ignore[arg-type]
    rows = set(scenes.rows[scenes.rows >= 0].tolist())
    assert rows <= held_out if split == "held-out" else rows.isdisjoint(held_out)
    for item in dataclasses.fields(Scenes):
        assert np.array_equal(getattr(scenes, item.name), getattr(again, item.name))
        assert np.array_equal(getattr(scenes[100:120], item.name), getattr(scenes, item.name)[100:120])


def test_people_are_drawn_less_often(pack: Pack) -> None:
    def share(config: SceneConfig) -> float:
        rows = Composer(pack, config=config).draw(4000, np.random.default_rng(0)).rows[:, 0]
        return float(np.mean([pack.pictures[row].group == "people" for row in rows if row >= 0]))

    equal = SceneConfig(people_weight=1.0, portrait_weight=1.0)
    assert share(SceneConfig(people_weight=0.25, portrait_weight=0.25)) < 0.5 * share(equal)


def test_photographs_are_cropped_flipped_and_blurred(pack: Pack, painter: Painter) -> None:
    """At scale 1 a photograph is the stored one; at scale 2 a corner of it, magnified; soft ones lose detail only."""
    row = int(pack.indices("all", "landscape")[0])
    stored = torch.from_numpy(pack.pixels([row])[0, ..., :3]).movedim(-1, 0) / 127.5 - 1
    plain = dataclasses.replace(one_scene(-1, 0, 0, "red", "red"), backdrop=np.array([row]))

    def paint(**changes: np.ndarray) -> Tensor:
        return painter.paint(dataclasses.replace(plain, **changes))[0]

    yes = np.array([True])
    torch.testing.assert_close(paint(), stored, atol=1e-4, rtol=0)
    torch.testing.assert_close(paint(backdrop_flip=yes), stored.flip(-1), atol=1e-4, rtol=0)
    half = PX // 2
    corner = paint(backdrop_view=np.array([[2.0, 1.0, 0.0]]))  # the upper right quarter
    smaller = torch.nn.functional.avg_pool2d(corner, 2)
    difference = (smaller - stored[:, :half, half:]).abs()
    assert difference[:, 1:-3, 1:-1].median() < 0.01  # edges of blocks are blurred
    soft = paint(backdrop_soft=yes)
    assert soft.std() <= stored.std() and (soft.mean() - stored.mean()).abs() < 0.02


@pytest.mark.parametrize("flip", [False, True])
def test_painter_places_sprites_on_the_background(flip: bool, pack: Pack, painter: Painter) -> None:
    row = next(row for row, picture in enumerate(pack.pictures) if picture.key == "noto/005")
    size = SpriteSizes.for_canvas(PX).medium
    image = to_bytes(painter.paint(one_scene(row, size, 16, "red", "red", flip))[0])  # (3, PX, PX)
    red = torch.tensor(PALETTE["red"])
    for y, x in ((7, 20), (20, 15), (20, 16 + size)):
        assert torch.equal(image[:, y, x], red)
    stored = torch.from_numpy(pack.pixels([row])[0, ..., :3]).long()
    block = size // 4
    for column in range(4):
        centre = image[:, 8 + block // 2, 16 + column * block + block // 2]
        expected = stored[8, PX // 4 * (3 - column if flip else column) + 8]
        assert (centre - expected).abs().max() <= 1


def test_gradients_run_from_top_to_bottom(painter: Painter) -> None:
    image = to_bytes(painter.paint(one_scene(-1, 0, 0, "white", "black"))[0])
    assert torch.equal(image[:, 0, 5], torch.tensor(PALETTE["white"]))
    assert torch.equal(image[:, -1, 5], torch.tensor(PALETTE["black"]))
    assert (image[0, 1:, 0] <= image[0, :-1, 0]).all()


def test_only_flippable_sprites_but_no_portraits_are_flipped(pack: Pack) -> None:
    scenes = Composer(pack, config=SceneConfig(flip=1.0)).draw(1000, np.random.default_rng(0))
    for slot in (0, 1):
        has_sprite = scenes.rows[:, slot] >= 0
        pictures = [pack.pictures[row] for row in scenes.rows[has_sprite, slot]]
        flippable = np.array([picture.flippable and picture.kind != "portrait" for picture in pictures])
        assert 0 < flippable.mean() < 1 and np.array_equal(scenes.flips[has_sprite, slot], flippable)
    flips = Composer(pack).draw(1000, np.random.default_rng(0)).flips
    assert 0.1 < flips[:, 0].mean() < 0.4


def test_captions_match_the_painted_background(pack: Pack, painter: Painter) -> None:
    composer = Composer(pack)
    scenes = composer.draw(300, np.random.default_rng(5))
    pixels = to_bytes(painter.paint(scenes))
    checked = 0
    for index, text in enumerate(composer.captions(scenes)):
        if scenes.rows[index, 0] < 0:
            assert text.startswith("a photo of")
        colour = re.search(r"\bon an? ([a-z ]+) background$", text)
        if colour and "gradient" not in text and scenes.sizes[index, 0] < PX:
            is_free = np.ones((PX, PX), dtype=bool)
            for slot in range(1 + (scenes.rows[index, 1] >= 0)):
                left, top, size = (int(part[index, slot]) for part in (scenes.x, scenes.y, scenes.sizes))
                is_free[top : top + size, left : left + size] = False
            assert (
                pixels[index].movedim(0, -1)[torch.from_numpy(is_free)] == torch.tensor(PALETTE[colour.group(1)])
            ).all()
            checked += 1
    assert checked > 50


def test_captions_say_size_position_direction_and_colour(pack: Pack) -> None:
    """On a canvas of the usual size; a word is never wrong, and nearly all of them occur."""
    large = copy.copy(pack)
    large.px = 192
    large.pictures = [
        dataclasses.replace(picture, subject="emoji cat") if picture.style == "noto" else picture
        for picture in pack.pictures
    ]
    composer = Composer(large, config=SceneConfig(photo=0, landscape=0, pair=0))
    scenes = composer.draw(3000, np.random.default_rng(0))
    middle = scenes.sizes[:, 0] / 2 - 96
    x, y = scenes.x[:, 0] + middle, scenes.y[:, 0] + middle
    seen = set()
    for index, text in enumerate(composer.captions(scenes)):
        subject = text.split(",")[0].split(" in front of ")[0]
        words = {
            word for word in ("small", "large", "left", "right", "top", "bottom") if re.search(rf"\b{word}\b", subject)
        }
        seen |= words
        assert ("small" in words) <= (scenes.sizes[index, 0] == 88) and ("large" in words) <= (
            scenes.sizes[index, 0] == 176
        )
        assert ("top" in words) <= (y[index] <= -24) and ("bottom" in words) <= (y[index] >= 24)
        facing = re.search("facing (left|right)", subject)
        if facing:
            assert large.pictures[scenes.rows[index, 0]].flippable
            assert (facing[1] == "right") == scenes.flips[index, 0]
        side = re.search(r"(?:on the|at the top|at the bottom) (left|right)", subject)
        if side:
            assert x[index] <= -24 if side[1] == "left" else x[index] >= 24
        colour = scenes.colours[index, 0]
        assert colour < 0 or SPRITE_COLOURS[colour] in subject.split()
    assert seen == {"small", "large", "left", "right", "top", "bottom"}
    assert set(np.unique(scenes.turns)) == {0.0, *TURNS} and len(np.unique(scenes.colours)) == len(SPRITE_COLOURS) + 1


@pytest.mark.parametrize(
    ("phrase", "adjectives", "expected"),
    [
        ("an owl", [], "an owl"),
        ("an owl", ["small", "purple"], "a small purple owl"),
        ("a fox", ["orange"], "an orange fox"),
        ("a red apple", ["blue"], "a blue apple"),
        ("a red apple", ["large"], "a large red apple"),
        ("glasses", ["small"], "small glasses"),
        ("a blackbird", ["blue"], "a blue blackbird"),
    ],
)
def test_adjectives_stand_before_the_noun(phrase: str, adjectives: list[str], expected: str) -> None:
    assert describe(phrase, adjectives) == expected


def test_turned_sprites_stay_in_their_square_and_recoloured_ones_change(pack: Pack, painter: Painter) -> None:
    row = next(row for row, picture in enumerate(pack.pictures) if picture.key == "noto/005")
    size = SpriteSizes.for_canvas(PX).medium
    scene = one_scene(row, size, 16, "white", "white")
    straight = painter.paint(scene)[0]
    turned = painter.paint(dataclasses.replace(scene, turns=np.array([[TURNS[1], 0.0]])))[0]
    outside = torch.ones(PX, PX, dtype=torch.bool)
    outside[8 : 8 + size, 16 : 16 + size] = False
    assert (turned[:, outside] == 1).all() and (turned - straight).abs().mean() > 0.05
    blue = dataclasses.replace(scene, colours=np.array([[SPRITE_COLOURS.index("blue"), -1]]))
    assert not torch.equal(painter.paint(blue), straight[None])


def test_scenes_of_equal_settings_are_painted_equally(pack: Pack, painter: Painter) -> None:
    scenes = Composer(pack).draw(40, np.random.default_rng(7))
    assert torch.equal(painter.paint(scenes), painter.paint(scenes))
    alone = painter.paint(scenes[3:4])
    torch.testing.assert_close(painter.paint(scenes)[3:4], alone, atol=1e-5, rtol=0)  # independent of the batch


def test_probabilities_are_checked() -> None:
    with pytest.raises(ConfigError, match="use at most 1"):
        SceneConfig(white=0.8, gradient=0.3)
