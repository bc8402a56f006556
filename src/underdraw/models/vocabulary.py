"""The words that a model was trained with, for models with few training captions: the file words.json."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError
from underdraw.io import read_json
from underdraw.tokenizers.text import normalize

FILE = "words.json"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Every word of the training captions, and lists of the phrases that prompts can be made of."""

    words: frozenset[str]
    phrases: dict[str, Any]  # title -> list of phrases, or {group: list of phrases}

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        """The words that no training caption has, each once, in the order of the texts."""
        return list(dict.fromkeys(word for text in texts for word in split_words(text) if word not in self.words))


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
    return Vocabulary(frozenset(content.pop("words")), content)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
