"""Text tokenizers of published checkpoints: tokenizer.json, folders that transformers has saved, tiktoken's files."""

from __future__ import annotations

import base64
import binascii
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from underdraw.errors import CheckpointError, first_line
from underdraw.extras import require_package
from underdraw.io import read_bytes

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class SavedTokenizer:
    """A text tokenizer of a checkpoint: text to ids, and the ids of all tokens by name."""

    encode: Encode
    size: int  # number of tokens
    ids: Mapping[str, int]
    source: Path  # file or folder
    start: str | None = None  # the token that texts start with: the tokenizer's bos_token, or else its eos_token

    def token_id(self, token: str) -> int:
        if token not in self.ids:
            raise CheckpointError(f"{self.source} has no token {token!r}; it is not the tokenizer of this model.")
        return self.ids[token]


def load_text_tokenizer(path: Path, pattern: str | None = None, *, add_special_tokens: bool = False) -> SavedTokenizer:
    """The tokenizer of a tokenizer.json; special tokens are parsed from the text, and by default none are added.

    `pattern` replaces the one that splits text before BPE, where a conversion changed the authors'; text is composed
    (NFC) before that, as `load_tiktoken` does.
    """
    tokenizers = require_package("tokenizers", "families", f"the text tokenizer {path.name}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); download it again.") from error
    if pattern is not None and type(tokenizer.model).__name__ == "BPE":
        splits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splits, to_bytes])
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    return SavedTokenizer(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids),
        size=tokenizer.get_vocab_size(),
        ids=tokenizer.get_vocab(),
        source=path,
    )


def load_saved_tokenizer(folder: Path, name: str) -> SavedTokenizer:
    """The tokenizer that transformers has saved in a folder: fast, or slow (vocab.json and merges.txt), as Qwen2's.

    `name` is the checkpoint's, for error messages.
    """
    library = require_package("transformers", "families", "the text tokenizer")
    if not any((folder / file).exists() for file in ("tokenizer.json", "vocab.json")):
        raise CheckpointError(f"{name} has no text tokenizer; put tokenizer.json or vocab.json into {folder}.")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"the text tokenizer in {folder} cannot be read ({first_line(error)}); download it again."
        ) from error
    return SavedTokenizer(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        size=len(tokenizer),
        ids=tokenizer.get_vocab(),
        source=folder,
        start=tokenizer.bos_token or tokenizer.eos_token,
    )


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
