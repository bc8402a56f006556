"""Decoder configurations in the layout of transformers: config.json to `Arch`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from underdraw.errors import CheckpointError, UnsupportedError
from underdraw.models.checkpoint import Checkpoint
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch


def with_defaults(config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration completed by its class's defaults, which transformers leaves out when it saves one."""
    return {**defaults, **{key: value for key, value in (config or {}).items() if value is not None}}


def max_positions(config: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> int:
    """The longest sequence that a configuration allows."""
    return int(with_defaults(config, defaults)["max_position_embeddings"])


def refuse_other_quantizers(checkpoint: Checkpoint) -> None:
    """Raise an UnsupportedError for weights that another program has quantised: their tensors have other names."""
    if quantization := checkpoint.config.get("quantization_config"):
        method = quantization.get("quant_method", "another program")
        raise UnsupportedError(
            f"{checkpoint.name} was quantised by {method}, whose formats are not supported; load the weights that it "
            "was made from, which the option weights quantises."
        )


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


def square_side(cells: int, name: str) -> int:
    """The side of a square grid with this many cells."""
    side = math.isqrt(cells)
    if side * side != cells:
        raise CheckpointError(f"{name} has {cells} image tokens, which do not form a square grid.")
    return side
