"""Recoloured sprites: which region changes, and that pixels get the colour that captions name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.tiny.grade_colours import grade_colour, requested_colour
from recipes.tiny.palette import SPRITE_COLOURS
from recipes.tiny.recolour import GRAY, colour_shares, find_region, name_colours, palette_tensor, recolour
from underdraw.errors import ConfigError

SIDE = 48
CPU = torch.device("cpu")


def shaded_disc(colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """A disc with shading from left to right and two black eyes, on a transparent background; (SIDE, SIDE, 4)."""
    y, x = np.mgrid[:SIDE, :SIDE]
    pixels = np.zeros((SIDE, SIDE, 4), np.uint8)
    shade = 0.7 + 0.3 * x / SIDE
    pixels[..., :3] = shade[..., None] * np.array(colour)
    pixels[..., 3] = 255 * (np.hypot(x - SIDE / 2, y - SIDE / 2) < SIDE * 0.45)
    pixels[16:20, 16:20, :3] = pixels[16:20, 28:32, :3] = 10
    return pixels


@pytest.mark.parametrize("natural", [(245, 130, 32), (60, 90, 220), (180, 180, 185), (240, 240, 240)])
@pytest.mark.parametrize("index", range(len(SPRITE_COLOURS)))
def test_a_recoloured_sprite_has_the_named_colour(natural: tuple[int, int, int], index: int) -> None:
    sprite = shaded_disc(natural)
    region = find_region(sprite)
    assert region is not None and (region[0] == GRAY) == (max(natural) - min(natural) < 20)
    rgb = torch.from_numpy(sprite[..., :3]).float() / 255
    painted = recolour(rgb[None], torch.tensor([region]), palette_tensor(CPU)[index][None])[0]
    eyes = painted[16:20, 16:20]
    assert (eyes < 0.1).all()  # black stays black
    alpha = torch.from_numpy(sprite[..., 3:]).float() / 255
    background = torch.tensor([0.35, 0.6, 0.58])  # teal, which is none of the names
    image = (painted * alpha + background * (1 - alpha)).movedim(-1, 0)
    prompt = f"a small {SPRITE_COLOURS[index]} ball, 3D render"
    graded = grade_colour(prompt, image)
    assert graded["obeyed"] and graded["share"] > 0.6, colour_shares(image)


def test_sprites_of_many_colours_are_left_alone() -> None:
    stripes = np.zeros((SIDE, SIDE, 4), np.uint8)
    stripes[..., 3] = 255
    for index, colour in enumerate(((230, 30, 30), (30, 200, 30), (40, 40, 230), (10, 10, 10))):
        stripes[:, index * 12 : index * 12 + 12, :3] = colour
    assert find_region(stripes) is None
    assert find_region(np.zeros((SIDE, SIDE, 4), np.uint8)) is None  # nothing is visible


def test_every_palette_colour_has_its_own_name() -> None:
    assert name_colours(palette_tensor(CPU)).tolist() == list(range(len(SPRITE_COLOURS)))
    assert name_colours(torch.tensor([0.55, 0.55, 0.55])).item() == -1  # gray has none


def test_prompts_name_the_colour_of_their_subject() -> None:
    assert requested_colour("an orange whale, soft illustration, on a white background") == "orange"
    with pytest.raises(ConfigError, match="does not begin with a coloured subject"):
        requested_colour("a fox on a red background")
