"""words.json of the tiny model: what the recipe lists, from which pictures."""

from __future__ import annotations

from recipes.tiny.data import Kind, Picture, is_held_out
from recipes.tiny.vocabulary import vocabulary


def picture(kind: Kind, group: str, phrase: str, subject: str = "emoji fox") -> Picture:
    return Picture(key=phrase, kind=kind, style="noto", group=group, phrase=phrase, subject=subject, flippable=True)


def test_vocabulary_lists_phrases_and_words() -> None:
    held_out = next(name for name in map("emoji {}".format, range(1000)) if is_held_out(name))
    content = vocabulary(
        [
            picture("sprite", "animals-nature", "a fox"),
            picture("sprite", "animals-nature", "an okapi", subject=held_out),
            picture("sprite", "people", "a man with dark skin tone and a beard"),
            picture("landscape", "travel-places", "the sea"),
            picture("photo", "food-drink", "Conference pears in a grocery store"),
            picture("portrait", "people", "a person with tan skin"),
        ]
    )
    assert content["subjects"] == {"animals and nature": ["a fox"], "people": ["a man with a beard"]}
    assert content["scenes"] == ["the sea"] and content["photos"] == ["Conference pears in a grocery store"]
    assert {"fox", "3d", "render", "teal", "gradient", "dark", "tone", "conference", "tan"} <= set(content["words"])
    assert not {"okapi", "subject", "style", "colour"} & set(content["words"])
