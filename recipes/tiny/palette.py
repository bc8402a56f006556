"""The colours that captions name: of backgrounds, and of sprites that are painted in another colour."""

from __future__ import annotations

import re

PALETTE: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255), "light gray": (226, 229, 233), "gray": (140, 146, 154), "black": (20, 20, 24),
    "sky blue": (142, 202, 240), "blue": (48, 108, 214), "navy blue": (26, 38, 90), "teal": (42, 150, 148),
    "mint green": (180, 232, 208), "green": (72, 158, 92), "yellow": (252, 216, 88), "orange": (246, 152, 66),
    "red": (208, 54, 58), "pink": (250, 188, 206), "purple": (124, 88, 192), "lavender": (214, 206, 246),
    "beige": (238, 225, 202), "brown": (122, 84, 62),
}  # fmt: skip
COLOURS = tuple(PALETTE)
WHITE = COLOURS.index("white")

# Colours of recoloured sprites, further apart than those of backgrounds, so that shading leaves them recognisable.
SPRITE_PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (220, 38, 44), "orange": (248, 128, 24), "yellow": (252, 208, 40), "green": (52, 168, 66),
    "blue": (40, 104, 226), "purple": (132, 62, 204), "pink": (252, 128, 184), "brown": (126, 78, 46),
    "black": (42, 42, 48), "white": (246, 246, 248),
}  # fmt: skip
SPRITE_COLOURS = tuple(SPRITE_PALETTE)
_COLOURED = re.compile(rf"(?:an? )?(?:{'|'.join(SPRITE_COLOURS)}|gray) ")


def with_article(name: str) -> str:
    """'an orange', 'a red'."""
    return ("an " if name[0] in "aeiou" else "a ") + name


def plain_phrase(colour: str) -> str:
    """'on a sky blue background'."""
    return f"on {with_article(colour)} background"


def gradient_phrase(top: str, bottom: str) -> str:
    """'on a navy blue to purple gradient background', from top to bottom."""
    return f"on {with_article(top)} to {bottom} gradient background"


BACKGROUND_PHRASES = tuple(plain_phrase(colour) for colour in COLOURS)


def describe(phrase: str, adjectives: list[str]) -> str:
    """A noun phrase with adjectives before its noun: 'an owl' and 'small', 'purple' -> 'a small purple owl'.

    A colour replaces the one that the phrase has: 'a red apple' and 'blue' -> 'a blue apple'.
    """
    if not adjectives:
        return phrase
    has_article = phrase.startswith(("a ", "an "))
    if adjectives[-1] in SPRITE_PALETTE and (colour := _COLOURED.match(phrase)):
        noun = phrase[colour.end() :]
    else:
        noun = phrase.split(" ", 1)[1] if has_article else phrase
    text = " ".join([*adjectives, noun])
    return with_article(text) if has_article else text
