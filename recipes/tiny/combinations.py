"""Did training show this? `python -m recipes.tiny.combinations --pack P --prompts F` tells for every prompt.

A prompt is read back into what a composed picture is made of: one subject or two, a style, a background. How many
pictures of a training run show the same is the number of pictures times the shares of its parts, which are counted in
captions that the composer draws: subjects and backgrounds are drawn independently of each other. A combination is new
if fewer than a twentieth of a picture is expected, so with a chance of 95 % or more no training picture showed it; a
subject that has no picture in a style, or none at all, is new for certain.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.tiny.compose import COLOURS, Composer, gradient_phrase, plain_phrase
from recipes.tiny.data import DEFAULT_STYLE, STYLES, Pack
from underdraw.bench.tables import markdown
from underdraw.prompts import load_prompts
from underdraw.training.command import run

NEW = 0.05  # expected pictures below which a combination counts as new
PICTURES = 6_000_000  # of a long training run: 23,000 steps of 256
COUNTED = 300_000  # captions that shares are counted in
WORDS = {style.words for style in STYLES.values()}
PAIR = re.compile(r"(.+) on the left and (.+) on the right")
BACKGROUND = re.compile(r"(.+?),? ((?:on an? [a-z ]+ background|in front of .+))")
PHOTO = "a photo of "


@dataclass(frozen=True, slots=True)
class Combination:
    """What a caption asks for. `subjects` has one phrase or two; a photograph has no background."""

    subjects: tuple[str, ...]
    style: str
    background: str

    @property
    def colour(self) -> str | None:
        """The colour of a plain background."""
        return _PLAIN.get(self.background)


_PLAIN = {plain_phrase(colour): colour for colour in COLOURS}
_GRADIENTS = {gradient_phrase(a, b) for a in COLOURS for b in COLOURS}


def read(caption: str) -> Combination:
    """The combination of a caption, in the composer's words; what is left unsaid is 3D render on white."""
    if caption.startswith(PHOTO):
        return Combination((caption.removeprefix(PHOTO),), "photo", "")
    found = BACKGROUND.fullmatch(caption)
    rest, background = (found[1], found[2]) if found else (caption, plain_phrase("white"))
    subject, _, style = rest.rpartition(", ")
    if style not in WORDS:
        subject, style = rest, STYLES[DEFAULT_STYLE].words
    pair = PAIR.fullmatch(subject)
    return Combination((pair[1], pair[2]) if pair else (subject,), style, background)


class Shares:
    """How often training draws what, counted in captions of a composer."""

    def __init__(self, composer: Composer, count: int = COUNTED, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.drawn = 0
        self._subjects: Counter[tuple[object, ...]] = Counter()
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._styles: Counter[str] = Counter()  # of pairs
        self._backgrounds: Counter[tuple[int, str]] = Counter()
        while self.drawn < count:
            self._count(composer.captions(composer.draw(min(10_000, count - self.drawn), rng)))

    def _count(self, captions: Iterable[str]) -> None:
        for caption in captions:
            one = read(caption)
            self.drawn += 1
            self._subjects[len(one.subjects), one.subjects[0], one.style] += 1
            self._backgrounds[len(one.subjects), one.background] += 1
            if len(one.subjects) == 2:
                self._seconds[one.subjects[1], one.style] += 1
                self._styles[one.style] += 1

    def expected(self, one: Combination, pictures: int = PICTURES) -> float:
        """How many of so many training pictures show it."""
        kind = len(one.subjects)
        share = self._subjects[kind, one.subjects[0], one.style] / self.drawn
        if kind == 2 and share:
            share *= self._seconds[one.subjects[1], one.style] / self._styles[one.style]
        if one.style != "photo":
            total = sum(count for (size, name), count in self._backgrounds.items() if size == kind and name)
            share *= self._backgrounds[kind, one.background] / max(1, total)
        return pictures * share


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the check."""
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny.combinations", description=__doc__)
    parser.add_argument("--pack", type=Path, required=True, help="training pack")
    parser.add_argument("--prompts", default="benchmarks/prompts64.txt", help="text file, one prompt a line")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="pictures of the training run")
    parser.add_argument("--captions", type=int, default=COUNTED, help="captions that shares are counted in")
    options = parser.parse_args(arguments)
    prompts = load_prompts(options.prompts)
    shares = Shares(Composer(Pack(options.pack)), options.captions)
    expected = [shares.expected(read(prompt), options.pictures) for prompt in prompts]
    print(markdown(("prompt", "expected pictures", ""), [_row(*pair) for pair in zip(prompts, expected, strict=True)]))
    new = sum(value < NEW for value in expected)
    print(f"\n{new} of {len(prompts)} prompts are combinations that no training picture showed.")


def _row(prompt: str, expected: float) -> list[str]:
    return [prompt, f"{expected:.3g}", "new" if expected < NEW else ""]


if __name__ == "__main__":
    run(main)
