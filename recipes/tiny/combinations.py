"""Tells which prompts are combinations that training did not show.

    python -m recipes.tiny.combinations --pack pack192.bin --prompts benchmarks/prompts64.txt

A prompt is parsed into one or two subjects, a style and a background. The number of training images with the same
combination is estimated from the frequencies of its parts in random captions: subjects and backgrounds are drawn
independently. A combination is new if fewer than 0.05 images are expected: then no training image showed it, with a
probability of at least 95 %. A subject without any image in a style is certainly new.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from recipes.tiny.compose import Composer
from recipes.tiny.data import DEFAULT_STYLE, STYLES, Pack
from underdraw.bench.report import markdown_table
from underdraw.bench.sections import Table
from underdraw.cli.app import main
from underdraw.prompts import load_prompts

app = typer.Typer(add_completion=False)
NEW = 0.05  # expected images below which a combination counts as new
IMAGES = 6_000_000  # of a long training run: 23,000 steps of 256
CAPTIONS = 300_000
STYLE_WORDS = {style.words for style in STYLES.values()}
PAIR = re.compile(r"(.+) on the left and (.+) on the right")
BACKGROUND = re.compile(r"(.+?),? ((?:on an? [a-z ]+ background|in front of .+))")
ARTICLE_AND_SIZE = re.compile(r"^(?:an? )?(?:(?:small|large) )?")
WHERE = re.compile(r"(?: facing (?:left|right))?(?: on the (?:left|right)| at the (?:top|bottom)(?: left| right)?)?$")
PHOTO = "a photo of "


@dataclass(frozen=True, slots=True)
class Combination:
    """What a caption describes: one or two subjects without article, size and position; the background if named.

    The colour of a subject is a part of it: a purple fox is another subject than a fox.
    """

    subjects: tuple[str, ...]
    style: str
    background: str


def parse_caption(caption: str) -> Combination:
    """The combination of a caption in the composer's words; without a style it counts as a 3D render."""
    if caption.startswith(PHOTO):
        return Combination((caption.removeprefix(PHOTO),), "photo", "")
    match = BACKGROUND.fullmatch(caption)
    rest, background = (match[1], match[2]) if match else (caption, "")
    subject, _, style = rest.rpartition(", ")
    if style not in STYLE_WORDS:
        subject, style = rest, STYLES[DEFAULT_STYLE].words
    pair = PAIR.fullmatch(subject)
    subjects = (pair[1], pair[2]) if pair else (WHERE.sub("", subject),)
    return Combination(tuple(ARTICLE_AND_SIZE.sub("", subject) for subject in subjects), style, background)


class CaptionStatistics:
    """Frequencies of subjects, styles and backgrounds in random captions."""

    def __init__(self, composer: Composer, count: int = CAPTIONS, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.total = 0
        self._subjects: Counter[tuple[int, str, str]] = Counter()  # number of subjects, first subject, style
        self._seconds: Counter[tuple[str, str]] = Counter()  # second subject of a pair, style
        self._pair_styles: Counter[str] = Counter()
        self._backgrounds: Counter[tuple[int, str]] = Counter()  # number of subjects, background
        while self.total < count:
            self._count(composer.captions(composer.draw(min(10_000, count - self.total), rng)))

    def _count(self, captions: Iterable[str]) -> None:
        for caption in captions:
            parsed = parse_caption(caption)
            number, style = len(parsed.subjects), parsed.style
            self.total += 1
            self._subjects[number, parsed.subjects[0], style] += 1
            if style != "photo":
                self._backgrounds[number, parsed.background] += 1
            if number == 2:
                self._seconds[parsed.subjects[1], style] += 1
                self._pair_styles[style] += 1

    def expected(self, combination: Combination, images: int = IMAGES) -> float:
        """How many of so many training images show the combination."""
        subjects, style = combination.subjects, combination.style
        number = len(subjects)
        probability = self._subjects[number, subjects[0], style] / self.total
        if number == 2 and probability:
            probability *= self._seconds[subjects[1], style] / self._pair_styles[style]
        if style != "photo":
            total = sum(seen for (size, _), seen in self._backgrounds.items() if size == number)
            probability *= self._backgrounds[number, combination.background] / max(1, total)
        return images * probability


@app.command()
def combinations(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    prompts: Annotated[
        str, typer.Option("--prompts", metavar="FILE", help="Text file with one prompt per line.")
    ] = "benchmarks/prompts64.txt",
    images: Annotated[int, typer.Option(min=1, help="Images of the training run.")] = IMAGES,
    captions: Annotated[int, typer.Option(min=1, help="Captions that frequencies are counted in.")] = CAPTIONS,
) -> None:
    """Print for every prompt how many training images are expected to show its combination."""
    texts = load_prompts(prompts)
    statistics = CaptionStatistics(Composer(Pack(pack)), captions)
    expected = [statistics.expected(parse_caption(text), images) for text in texts]
    rows = [[text, f"{value:.3g}", "new" if value < NEW else ""] for text, value in zip(texts, expected, strict=True)]
    print(markdown_table(Table(("prompt", "expected images", ""), rows)))
    new = sum(value < NEW for value in expected)
    print(f"\n{new} of {len(texts)} prompts are combinations that no training image showed.")


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.combinations"))
