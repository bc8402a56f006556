"""Short prompts of the embedded model become captions like those of its training; all others stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

import underdraw
from underdraw.models.tiny_prompts import complete_prompt
from underdraw.models.vocabulary import Vocabulary, load_vocabulary
from underdraw.prompts import load_prompts
from underdraw.tokenizers.text import normalize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    loaded = load_vocabulary(Path(underdraw.__file__).parent / "assets" / "tiny")
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    ("prompt", "caption"),
    [
        ("pizza", "a pizza, 3D render"),
        ("A PIZZA.", "a pizza, 3D render"),
        ("the castle", "a castle, 3D render"),
        ("owl", "an owl, 3D render"),
        ("red apple", "a red apple, 3D render"),
        ("a pink elephant", "a pink elephant, 3D render"),
        ("small purple fox facing right on the left", "a small purple fox facing right on the left, 3D render"),
        ("a fox on a sky blue background", "a fox, 3D render, on a sky blue background"),
        ("a fox, in front of the sea", "a fox, 3D render, in front of the sea"),
        ("mountains", "a photo of mountains"),
        ("beach", "a photo of a beach"),
        ("photo of a lake", "a photo of a lake"),
        ("a heart", "a red heart, 3D render"),
    ],
)
def test_short_prompts_are_completed(prompt: str, caption: str, vocabulary: Vocabulary) -> None:
    assert complete_prompt(prompt, vocabulary) == caption
    assert complete_prompt(caption, vocabulary) == caption, "a caption stays as it is"


@pytest.mark.parametrize(
    "prompt",
    ["", " ", "a lighthouse", "rocket in space", "a dog wearing sunglasses", "three strawberries", "¡hola!",
     "a fox, blob emoji", "on a red background", "a person with tan skin, cartoon portrait"],
)  # fmt: skip
def test_other_prompts_stay_as_they_are(prompt: str, vocabulary: Vocabulary) -> None:
    assert complete_prompt(prompt, vocabulary) == prompt


def test_styles_are_those_of_training(vocabulary: Vocabulary) -> None:
    assert set(vocabulary.styles.values()) == set(vocabulary.phrases["styles"])
    assert complete_prompt("an angry face", vocabulary).endswith(vocabulary.styles["an angry face"])
    assert "subjects by best style" not in vocabulary.phrases, "not a list for readers"


def test_complete_captions_of_the_benchmarks_are_not_changed(vocabulary: Vocabulary) -> None:
    for name in ("prompts_kinds.json", "prompts_colours.txt"):
        for prompt in load_prompts(str(BENCHMARKS / name)):
            assert normalize(complete_prompt(prompt, vocabulary)) == normalize(prompt)


def test_models_without_a_list_of_words_take_prompts_as_they_are() -> None:
    assert complete_prompt("pizza", None) == "pizza"
