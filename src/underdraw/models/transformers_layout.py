"""What checkpoints in the layout of transformers share: configurations, text tokenizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.extras import require_package
from underdraw.models.checkpoint import first_line
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch

Encode = Callable[[str], list[int]]
ROTARY = r".*rotary_emb\.inv_freq$"  # a table that some versions saved and everybody computes


def decoder_arch(config: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> Arch:
    """The decoder that a configuration describes; configurations leave out what equals their class's defaults."""
    known = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    for key in ("attention_bias", "mlp_bias"):
        if known.get(key):
            raise UnsupportedError(f"{where} has {key}; no published model of its family has, and it cannot be loaded.")
    if known.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{where} has the activation {known['hidden_act']!r}; only silu can be loaded.")
    rope = known.get("rope_parameters") or known.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"{where} scales its positions ({kind}); only unscaled rotary positions can be loaded.")
    try:
        dim, heads = int(known["hidden_size"]), int(known["num_attention_heads"])
        width = int(known.get("head_dim", dim // heads))
        return Arch(
            dim=dim,
            layers=int(known["num_hidden_layers"]),
            heads=heads,
            ffn=int(known["intermediate_size"]),
            vocab=int(known["vocab_size"]),
            rope=Rope.one_axis(width, float(rope.get("rope_theta", known.get("rope_theta", 10000.0)))),
            kv_heads=int(known.get("num_key_value_heads", heads)),
            head_dim=width,
            norm_eps=float(known["rms_norm_eps"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the configuration of {where} is incomplete or damaged ({error!r}).") from error


def text_encoder(path: Path) -> Encode:
    """Text to token ids with a tokenizer.json; special tokens are read from the text, none are added."""
    tokenizer = _tokenizer(path)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _tokenizer(path: Path) -> Any:
    tokenizers = require_package("tokenizers", "families", f"the text tokenizer {path.name}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every damage
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); fetch it again.") from error


def special(path: Path, token: str) -> int:
    """Id of a special token in a tokenizer.json."""
    found = _tokenizer(path).token_to_id(token)
    if found is None:
        raise CheckpointError(f"{path} knows no token {token!r}; it is not the tokenizer of this model.")
    return int(found)


def square(count: int, where: str) -> int:
    """The side of a square grid of `count` cells."""
    side = math.isqrt(count)
    if side * side != count:
        raise CheckpointError(f"{where} has {count} image tokens, which are no square grid.")
    return side
