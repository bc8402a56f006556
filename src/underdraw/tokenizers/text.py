"""The tiny family's text tokenizer: whole words and byte-level BPE, in pure Python.

Token ids: 0 is padding, 1 the beginning of a prompt (BOS), then the 256 bytes, then one id per merge in the order of
learning, then one per word of the vocabulary. A word of the vocabulary is one token; anything else is encoded by merges
and bytes, so text in any script encodes, only to more tokens. Merges and words are learnt by
recipes/tiny/text_tokenizer.py.
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

from underdraw.errors import CheckpointError, check_counts
from underdraw.io import atomic_write_text, read_json_object

PAD, BOS, FIRST_BYTE = 0, 1, 2
FIRST_MERGE = FIRST_BYTE + 256
MAX_TOKEN_BYTES, MAX_PROMPT_TOKENS = 2**10, 2**16
_PIECES = re.compile(r" ?\w+| ?[^\w\s]+|\s+")


def normalize(text: str) -> str:
    """Text in NFKC and lower case, with single spaces and none at the ends."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def pre_tokenize(text: str) -> list[str]:
    """Split normalized text into words, each with the space before it; merges never cross them."""
    return _PIECES.findall(" " + text) if text else []


class TextTokenizer:
    """Encodes prompts with fixed merges and a vocabulary of words, which include the space before them."""

    def __init__(self, merges: Sequence[tuple[int, int]], words: Sequence[str] = (), max_length: int = 32) -> None:
        self.merges = tuple((int(left), int(right)) for left, right in merges)
        self.words = tuple(words)
        self.max_length = max_length
        check_counts("a text vocabulary", MAX_PROMPT_TOKENS, max_length=max_length)
        self._ranks = {pair: FIRST_MERGE + rank for rank, pair in enumerate(self.merges)}
        self._bytes: list[bytes] = [b"", b"", *(bytes([value]) for value in range(256))]
        for left, right in self.merges:
            if not 0 <= min(left, right) <= max(left, right) < len(self._bytes):
                raise CheckpointError(f"the text vocabulary merges {left} and {right}, which are not tokens before it.")
            self._bytes.append(self._bytes[left] + self._bytes[right])
            if len(self._bytes[-1]) > MAX_TOKEN_BYTES:
                raise CheckpointError(f"the text vocabulary has a token of more than {MAX_TOKEN_BYTES} bytes.")
        self._word_ids = {word: len(self._bytes) + index for index, word in enumerate(self.words)}
        self._bytes += [word.encode() for word in self.words]
        # Captions repeat their words, so nearly every piece is cached.
        self._cached_piece = functools.lru_cache(maxsize=65536)(self.encode_piece)

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, BOS first, truncated to `max_length`."""
        return [BOS, *self.encode_text(text)][: self.max_length]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text without BOS, not truncated."""
        return [token for piece in pre_tokenize(normalize(text)) for token in self._cached_piece(piece)]

    def encode_batch(self, texts: Sequence[str], side: Literal["left", "right"] = "left") -> list[list[int]]:
        """Token ids of several prompts, padded to `max_length` on one side."""
        rows = []
        for text in texts:
            ids = self.encode(text)
            padding = [PAD] * (self.max_length - len(ids))
            rows.append(padding + ids if side == "left" else ids + padding)
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; invalid UTF-8 (a prompt truncated inside a character) becomes replacement characters."""
        return b"".join(self._bytes[token] for token in ids).decode("utf-8", errors="replace").strip()

    def encode_piece(self, piece: str) -> tuple[int, ...]:
        """Token ids of one word with its space."""
        if piece in self._word_ids:
            return (self._word_ids[piece],)
        ids = [FIRST_BYTE + value for value in piece.encode()]
        while len(ids) > 1:
            candidates = [(self._ranks[pair], index) for index, pair in enumerate(pairwise(ids)) if pair in self._ranks]
            if not candidates:
                break
            token, index = min(candidates)
            ids[index : index + 2] = [token]
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
        atomic_write_text(Path(path), text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Read a vocabulary that `save` wrote."""
        document = read_json_object(Path(path), "a text vocabulary", CheckpointError)
        if document.get("kind") != "underdraw-text" or document.get("version") != 1:
            raise CheckpointError(
                f"{path} is not a text vocabulary of version 1; train one with python -m recipes.tiny.text_tokenizer."
            )
        return cls(document["merges"], document["words"], document["max_length"])
