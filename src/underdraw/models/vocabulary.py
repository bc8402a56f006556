"""The words that a model was trained with, for models with few training captions: the file words.json."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError
from underdraw.io import read_json
from underdraw.tokenizers.text import normalize

FILE = "words.json"
STYLES = "subjects by best style"  # key of the file
SIMILARITY = 0.8  # of two words, 1 for equal ones: "strawberries" and "strawberry" have 0.82


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every word of the training captions, and lists of the phrases that prompts can be made of."""

    words: frozenset[str]
    phrases: dict[str, Any]  # title -> list of phrases, or {group: list of phrases}
    styles: dict[str, str]  # of the subjects that pictures of a sprite show: the best one that training had

    @property
    def photographs(self) -> frozenset[str]:
        """Scenes and what photographs show, normalized."""
        return frozenset(normalize(phrase) for title in ("scenes", "photos") for phrase in self.phrases.get(title, ()))

    @property
    def adjectives(self) -> frozenset[str]:
        """The words for size and colour that may stand before a subject."""
        return frozenset(("small", "large", *self.phrases.get("sprite colours", ())))

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        """The words that no training caption has, each once, in the order of the texts."""
        return list(dict.fromkeys(word for text in texts for word in split_words(text) if word not in self.words))

    def similar_words(self, words: Iterable[str]) -> list[str]:
        """The training words that begin like unknown ones and are spelt almost like them: singulars, typing errors."""
        similar = []
        for word in words:
            if len(word) > 3:
                candidates = sorted(other for other in self.words if other.startswith(word[:3]) and len(other) > 3)
                similar += get_close_matches(word, candidates, n=1, cutoff=SIMILARITY)
        return list(dict.fromkeys(similar))


def split_words(text: str) -> list[str]:
    """The words of a text, normalized as the text tokenizer does and without punctuation."""
    return re.findall(r"\w+", normalize(text))


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary of a checkpoint; None if its folder has no words.json."""
    path = folder / FILE
    if not path.exists():
        return None
    content = read_json(path, "a list of words", CheckpointError)
    values = content.values() if isinstance(content, dict) else ()
    lists = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("words"), list)
        or not all(map(_is_list_of_texts, lists))
    ):
        raise CheckpointError(f'{path} has no list "words" of texts; copy the checkpoint\'s file again, or delete it.')
    styles = content.pop(STYLES, {})
    best = {normalize(phrase): style for style, phrases in styles.items() for phrase in phrases}
    return Vocabulary(frozenset(content.pop("words")), content, best)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
