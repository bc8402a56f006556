"""Readers for files in the layout of transformers: decoder configurations and tokenizer.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError, UnsupportedError, first_line
from underdraw.extras import require_package
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch

Encode = Callable[[str], list[int]]
ROPE_BUFFERS = r".*rotary_emb\.inv_freq$"  # saved by some versions of transformers; we compute these frequencies


def with_defaults(config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration completed by its class's defaults, which transformers leaves out when it saves one."""
    return {**defaults, **{key: value for key, value in (config or {}).items() if value is not None}}


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
