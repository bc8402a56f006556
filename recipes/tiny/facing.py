"""Which sprites are drawn from the side and look to the left, and which look the same in a mirror.

Captions say where a side view faces. Sprites that look nearly the same in a mirror are not mirrored: seeds would not
differ visibly, but the decoder would have two sequences of codes to learn, and mixes them within one face.
"""

from __future__ import annotations

import numpy as np

from recipes.tiny.data import Picture

_SYMMETRY_BLOCK = 4  # pixels a side; edges that are shifted by less count as equal
_SYMMETRIC = 30.0  # mean difference of mirrored levels, of 255, over a sprite; front views of faces have 10 to 25

# Emoji sets agree that a side view looks to the left. Seen by eye in these styles; the others have exceptions.
_STYLES = ("fluent-3d", "fluent-color", "fluent-flat", "noto")
_SUBJECTS = {
    "cat", "horse", "unicorn", "zebra", "cow", "ox", "pig", "boar", "ram", "ewe", "goat", "camel", "llama", "giraffe",
    "elephant", "mammoth", "rhinoceros", "hippopotamus", "mouse", "rat", "rabbit", "chipmunk", "kangaroo", "badger",
    "rooster", "bird", "dove", "duck", "swan", "dodo", "flamingo", "parrot", "sauropod", "t-rex", "whale", "fish",
    "shark", "snail", "deer", "bison", "leopard", "tiger", "poodle", "skunk", "goose", "donkey", "locomotive", "bus",
    "automobile", "motorcycle", "tractor", "helicopter", "water buffalo", "two-hump camel", "spouting whale",
    "sport utility vehicle", "delivery truck", "articulated lorry", "racing car", "motor scooter",
}  # fmt: skip


def faces_left(picture: Picture) -> bool:
    """Whether a sprite, not mirrored, clearly faces left."""
    return picture.flippable and picture.style in _STYLES and picture.subject.removeprefix("emoji ") in _SUBJECTS


def is_symmetric(pixels: np.ndarray) -> bool:
    """Whether a sprite, (px, px, 4) with straight alpha, looks nearly the same in a mirror."""
    side = pixels.shape[0] // _SYMMETRY_BLOCK
    colour, alpha = pixels[..., :3].astype(np.float64), pixels[..., 3:].astype(np.float64)
    layers = np.concatenate([colour * alpha / 255, alpha], axis=-1)[: side * _SYMMETRY_BLOCK, : side * _SYMMETRY_BLOCK]
    blocks = layers.reshape(side, _SYMMETRY_BLOCK, side, _SYMMETRY_BLOCK, 4).mean((1, 3))
    covered = max(blocks[..., 3].mean() / 255, 0.01)
    return bool(np.abs(blocks - blocks[:, ::-1]).mean() / covered < _SYMMETRIC)
