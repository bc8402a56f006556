"""Completes short prompts of the tiny family to captions like those of its training: "pizza" to "a pizza, 3D render".

Training captions name a style: "a fox, 3D render, on a sky blue background". Without one, or without an article, the
decoder is less certain what to draw, and draws it worse. Only prompts whose subject the model knows are changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from underdraw.models.vocabulary import Vocabulary
from underdraw.tokenizers.text import normalize

PHOTO = "a photo of "
_BACKGROUND = re.compile(r",? (?:on an? [^,]+ background|in front of [^,]+)$")
_ARTICLE = re.compile(r"^(?:an?|the) ")
_PLACE = re.compile(r" (?:facing (?:left|right)|on the (?:left|right)|at the (?:top|bottom)(?: left| right)?)$")


def complete_prompt(text: str, vocabulary: Vocabulary | None) -> str:
    """The prompt with an article and a style where they are missing; "mountains" becomes "a photo of mountains"."""
    if vocabulary is None:
        return text
    caption = normalize(text).rstrip(" .!")
    if caption.startswith("photo of "):
        return f"a {caption}"
    scene = next((phrase for phrase in _with_articles(caption) if phrase in vocabulary.photographs), None)
    if scene is not None:
        return PHOTO + scene
    background = match.group() if (match := _BACKGROUND.search(caption)) else ""
    subject = caption.removesuffix(background)
    phrase, style = _find_subject(subject, vocabulary) or _find_kind(subject, vocabulary) or (None, None)
    if phrase is None:
        return text
    return f"{phrase}, {style}" + (f", {background.lstrip(', ')}" if background else "")


def _find_subject(subject: str, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """A subject that training had, as in the prompt but with its article, and its best style."""
    for phrase in _with_articles(subject):
        for known in _simpler(phrase, vocabulary):
            if known in vocabulary.styles:
                return phrase, vocabulary.styles[known]
    return None


def _find_kind(subject: str, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """For one or two words: the simplest training subject that is one of this kind, a red heart for a heart."""
    words = _ARTICLE.sub("", subject).split()
    known = [phrase for phrase in vocabulary.styles if words and phrase.split()[-1] == words[-1]]
    if len(words) > 2 or not known:
        return None
    phrase = min(known, key=lambda phrase: (len(phrase.split()), len(phrase), phrase))
    return phrase, vocabulary.styles[phrase]


def _with_articles(phrase: str) -> Iterator[str]:
    """The phrase as it is, and with the articles that it may lack."""
    bare = _ARTICLE.sub("", phrase)
    yield phrase
    yield f"a {bare}"
    yield f"an {bare}"
    yield f"the {bare}"
    yield bare


def _simpler(phrase: str, vocabulary: Vocabulary) -> Iterator[str]:
    """The phrase, then without what it says of place, direction, size and colour."""
    yield phrase
    while phrase != (shorter := _PLACE.sub("", phrase)):
        phrase = shorter
        yield phrase
    words = phrase.split()
    while words[:1] in (["a"], ["an"]) and len(words) > 2 and words[1] in vocabulary.adjectives:
        words.pop(1)
        yield " ".join(["a", *words[1:]])
        yield " ".join(["an", *words[1:]])  # an elephant, of a pink elephant
