"""Which sprites are drawn from the side and look to the left, so that captions can say where their subject faces."""

from __future__ import annotations

from recipes.tiny.data import Picture

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
