"""Readers for files in the layout of transformers: decoder configurations and tokenizer.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError, UnsupportedError, first_line
from underdraw.extras import require_package
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch

Encode = Callable[[str], list[int]]


def with_defaults(config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration completed by its class's defaults, which transformers leaves out when it saves one."""
    return {**defaults, **{key: value for key, value in (config or {}).items() if value is not None}}


def max_positions(config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> int:
    """The longest sequence that a configuration allows."""
    return int(with_defaults(config, defaults)["max_position_embeddings"])


def decoder_arch(config: Mapping[str, Any] | None, defaults: Mapping[str, Any], name: str) -> Arch:
    """The decoder that a Llama-like configuration describes; `name` is the checkpoint's, for error messages."""
    values = with_defaults(config, defaults)
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise UnsupportedError(
                f"{name} has {key}, which no published model of its family has; it is not supported."
            )
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{name} has the activation {values['hidden_act']!r}; only silu is supported.")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UnsupportedError(f"{name} scales its rotary positions ({rope_type}); only unscaled RoPE is supported.")
    try:
        dim, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        head_dim = int(values.get("head_dim", dim // heads))
        return Arch(
            dim=dim,
            layers=int(values["num_hidden_layers"]),
            heads=heads,
            ffn=int(values["intermediate_size"]),
            vocab=int(values["vocab_size"]),
            rope=Rope.one_axis(head_dim, float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))),
            kv_heads=int(values.get("num_key_value_heads", heads)),
            head_dim=head_dim,
            norm_eps=float(values["rms_norm_eps"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration of {name} is incomplete or damaged ({error!r}).") from error


def load_text_tokenizer(path: Path, pattern: str | None = None, *, add_special_tokens: bool = False) -> Encode:
    """A function from text to token ids; special tokens are parsed from the text, and by default none are added.

    `pattern` replaces the one that splits text before BPE, where a conversion changed the authors'.
    """
    tokenizer = _read_tokenizer(path)
    if pattern is not None and type(tokenizer.model).__name__ == "BPE":
        tokenizers = require_package("tokenizers", "families", f"the text tokenizer {path.name}")
        splits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splits, to_bytes])
    return lambda text: list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


@dataclass(frozen=True, slots=True)
class SavedTokenizer:
    """A text tokenizer: text to ids without special tokens, its number of tokens, and their ids by name."""

    encode: Encode
    size: int
    ids: Mapping[str, int]
    start: str | None  # the token that texts start with: the tokenizer's bos_token, or else its eos_token
    source: Path

    def token_id(self, token: str) -> int:
        if token not in self.ids:
            raise CheckpointError(f"{self.source} has no token {token!r}; it is not the tokenizer of this model.")
        return self.ids[token]


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
        start=tokenizer.bos_token or tokenizer.eos_token,
        source=folder,
    )


def special_token_id(path: Path, token: str) -> int:
    """The id of a special token in a tokenizer.json."""
    token_id = _read_tokenizer(path).token_to_id(token)
    if token_id is None:
        raise CheckpointError(f"{path} has no token {token!r}; it is not the tokenizer of this model.")
    return int(token_id)


def _read_tokenizer(path: Path) -> Any:
    tokenizers = require_package("tokenizers", "families", f"the text tokenizer {path.name}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every kind of damage
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); download it again.") from error


def square_side(cells: int, name: str) -> int:
    """The side of a square grid with this many cells."""
    side = math.isqrt(cells)
    if side * side != cells:
        raise CheckpointError(f"{name} has {cells} image tokens, which do not form a square grid.")
    return side
