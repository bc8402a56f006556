"""Captions parsed into combinations, and how many training images are expected to show them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import sprite_pack
from commands import run_script

from recipes.tiny import combinations
from recipes.tiny.combinations import ARTICLE_AND_SIZE, CaptionStatistics, Combination, parse_caption
from recipes.tiny.compose import Composer
from recipes.tiny.data import STYLES, Pack
from recipes.tiny.palette import SPRITE_COLOURS
from underdraw.prompts import load_prompts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "subjects", "style", "background"),
    [
        ("a fox", ("fox",), "3D render", ""),
        ("a fox, blob emoji", ("fox",), "blob emoji", ""),
        ("a red fox on a blue background", ("red fox",), "3D render", "on a blue background"),
        ("an owl, 3D render, in front of a lake", ("owl",), "3D render", "in front of a lake"),
        ("a cat in front of the sea", ("cat",), "3D render", "in front of the sea"),
        ("a photo of a lake", ("a lake",), "photo", ""),
        ("a small blue fox facing left at the top right, flat emoji", ("blue fox",), "flat emoji", ""),
        ("a large owl on the left in front of a lake", ("owl",), "3D render", "in front of a lake"),
        (
            "a person with tan skin, a bun and a shirt, doodle portrait, on a navy blue to red gradient background",
            ("person with tan skin, a bun and a shirt",), "doodle portrait",
            "on a navy blue to red gradient background",
        ),
        (
            "a fox on the left and an owl on the right, flat emoji, on an orange background",
            ("fox", "owl"), "flat emoji", "on an orange background",
        ),
    ],
)  # fmt: skip
def test_captions_are_parsed(text: str, subjects: tuple[str, ...], style: str, background: str) -> None:
    assert parse_caption(text) == Combination(subjects, style, background)


def test_every_composed_caption_is_parsed(pack: Pack) -> None:
    composer = Composer(pack)
    phrases = {ARTICLE_AND_SIZE.sub("", picture.phrase) for picture in pack.pictures if picture.kind == "sprite"}
    phrases |= {f"{colour} {phrase}" for phrase in phrases for colour in SPRITE_COLOURS}
    phrases |= {ARTICLE_AND_SIZE.sub("", picture.phrase) for picture in pack.pictures if picture.kind == "portrait"}
    phrases |= {picture.phrase for picture in pack.pictures}
    for text in composer.captions(composer.draw(500, np.random.default_rng(0))):
        parsed = parse_caption(text)
        assert set(parsed.subjects) <= phrases, text


def test_expected_images_match_counted_captions(pack: Pack) -> None:
    """Products of frequencies against the number of whole combinations in as many new captions."""
    composer, count = Composer(pack), 30_000
    statistics = CaptionStatistics(composer, count)
    parsed = [parse_caption(text) for text in composer.captions(composer.draw(count, np.random.default_rng(9)))]
    for combination, number in Counter(parsed).most_common(40):
        assert statistics.expected(combination, count) == pytest.approx(number, abs=5 * number**0.5), combination
    pairs = sum(len(combination.subjects) == 2 for combination in parsed)
    names = [f"t{n}" for n in range(60)]
    words = [STYLES[style].words for style in sprite_pack.STYLES]
    total = sum(
        statistics.expected(Combination((left, right), style, "on a white background"), count)
        for left in names for right in names for style in words
    )  # fmt: skip
    assert 0.1 * pairs < total < pairs  # over all pairs: those on white


def test_combinations_that_were_not_shown_are_new(pack: Pack, tmp_path: Path) -> None:
    texts = ["a t1, 3D render", "a t7, flat emoji", "a blue t1, 3D render", "a t1 on the left and a t3 on the right"]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    options = ["--pack", pack.path, "--prompts", tmp_path / "prompts.txt", "--images", 100, "--captions", 20000]
    done = run_script(combinations, *options)
    assert done.code == 0, done.err
    assert done.out.splitlines()[2].endswith("|  |") and done.out.count("| new |") == 3
    assert "3 of 4 prompts" in done.out


def test_documented_prompts_use_the_composers_words() -> None:
    """Whether half of them are new depends on the pack; recipes/tiny/README.md has the command."""
    prompts = load_prompts(str(ROOT / "benchmarks" / "prompts64.txt"))
    assert len(set(prompts)) == 64
    parsed = [parse_caption(text) for text in prompts]
    assert all(len(combination.subjects) == 1 for combination in parsed[:32])
    assert sum(len(combination.subjects) == 2 for combination in parsed[32:]) >= 10
    assert sum(combination.style == "blob emoji" for combination in parsed[32:]) >= 8
