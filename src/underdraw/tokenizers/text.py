"""Words and byte-level BPE for prompts: lower-case text to at most a few dozen token ids and back. Pure Python.

Ids: 0 pads, 1 begins a prompt, then the 256 bytes, then one id per merge in the order of learning, then one per known
word. A known word is one token; anything else is spelled with merges and bytes, so text in any script encodes, only to
more tokens. How merges and words are chosen is `training.text`'s business.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from underdraw.errors import CheckpointError

PAD, BEGIN, FIRST_BYTE = 0, 1, 2
FIRST_MERGE = FIRST_BYTE + 256
_PIECES = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


def normalize(text: str) -> str:
    """One spelling for what looks the same: NFKC, lower case, single spaces, none at the ends."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def pieces(text: str) -> list[str]:
    """The words of normalized text, each with the space before it; merges never cross their borders."""
    return _PIECES.findall(" " + text) if text else []


class TextTokenizer:
    """Encodes prompts with fixed merges and words. A word includes the space before it."""

    def __init__(self, merges: Sequence[tuple[int, int]], words: Sequence[str] = (), max_length: int = 32) -> None:
        self.merges = tuple((int(left), int(right)) for left, right in merges)
        self.words = tuple(words)
        self.max_length = max_length
        self._ranks = {pair: FIRST_MERGE + rank for rank, pair in enumerate(self.merges)}
        self._bytes: list[bytes] = [b"", b"", *(bytes([value]) for value in range(256))]
        for left, right in self.merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._word_ids = {word: len(self._bytes) + place for place, word in enumerate(self.words)}
        self._bytes += [word.encode() for word in self.words]
        # Captions repeat their words, so nearly every piece is found here.
        self._piece_ids = functools.lru_cache(maxsize=65536)(self.spell)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, BEGIN first, cut after `max_length`."""
        return [BEGIN, *self.spell_all(text)][: self.max_length]

    def spell_all(self, text: str) -> list[int]:
        """Ids of a whole text, without BEGIN and however many there are."""
        return [token for piece in pieces(normalize(text)) for token in self._piece_ids(piece)]

    def encode_batch(self, texts: Sequence[str], side: Literal["left", "right"] = "left") -> list[list[int]]:
        """Ids of several prompts, padded to `max_length` on the given side."""
        rows = []
        for text in texts:
            ids = self.encode(text)
            padding = [PAD] * (self.max_length - len(ids))
            rows.append(padding + ids if side == "left" else ids + padding)
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 (a prompt cut in mid-character) become replacement signs."""
        return b"".join(self._bytes[token] for token in ids).decode("utf-8", errors="replace").strip()

    def spell(self, piece: str) -> tuple[int, ...]:
        """Ids of one piece."""
        if piece in self._word_ids:
            return (self._word_ids[piece],)
        ids = [FIRST_BYTE + value for value in piece.encode()]
        while len(ids) > 1:
            candidates = [(self._ranks[pair], place) for place, pair in enumerate(pairwise(ids)) if pair in self._ranks]
            if not candidates:
                break
            token, place = min(candidates)
            ids[place : place + 2] = [token]
        return tuple(ids)

    def save(self, path: str | Path) -> None:
        """Write the vocabulary as JSON."""
        document = {
            "kind": "underdraw-text",
            "version": 1,
            "max_length": self.max_length,
            "merges": self.merges,
            "words": self.words,
        }
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Read a vocabulary that `save` wrote."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError) as error:
            raise CheckpointError(f"no text vocabulary could be read from {path} ({error})") from error
        if document.get("kind") != "underdraw-text" or document.get("version") != 1:
            raise CheckpointError(
                f"{path} is not a text vocabulary of version 1; train one with python -m recipes.tiny.text"
            )
        return cls(document["merges"], document["words"], document["max_length"])
