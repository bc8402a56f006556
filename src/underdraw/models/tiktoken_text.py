"""Text tokenizers in tiktoken's format: a file of byte sequences and ranks, and a pattern that splits the text."""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from underdraw.errors import CheckpointError, first_line
from underdraw.extras import require_package
from underdraw.io import read_bytes
from underdraw.models.transformers_layout import Encode


def load_tiktoken(path: Path, pattern: str, special_tokens: Sequence[str]) -> Encode:
    """A function from text to token ids; special tokens are parsed from the text, none are added.

    The ids of the special tokens follow those of the file.
    """
    tiktoken = require_package("tiktoken", "families", f"the text tokenizer {path.name}")
    try:
        lines = [line.split() for line in read_bytes(path, "a text tokenizer", CheckpointError).splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("its ranks are not 0, 1, 2, ...")
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); download it again.") from error
    specials = {token: len(ranks) + index for index, token in enumerate(special_tokens)}
    encoding = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    return lambda text: list(encoding.encode(unicodedata.normalize("NFC", text), allowed_special="all"))
