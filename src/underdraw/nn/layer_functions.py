"""The parts of a decoder between one attention and the next, as functions that can be compiled or replaced by kernels.

`layer_to_layer` covers everything from the attention output of one layer to the queries of the next: output
projection, FFN, norms, QKV projection, RoPE and the KV cache write. Compiled, that is a few kernels around the GEMMs;
run eagerly, it is what `Transformer.forward` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from underdraw.nn.attention import attention_bias
from underdraw.nn.rope import CosSin, split_cos_sin
from underdraw.nn.transformer import Arch, DecoderLayer, Transformer


def qkv_to_cache(
    layer: DecoderLayer, x: Tensor, cos_sin: CosSin, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Write the layer's keys and values to `slots` (R, N, G) of caches (R * G * L, D); return queries (R, N, H, D)."""
    q, k, v = layer.pre_attention(x, cos_sin)
    keys.index_put_((slots,), k)
    values.index_put_((slots,), v)
    return q


def layer_to_layer(
    layer: DecoderLayer,
    next_layer: DecoderLayer,
    x: Tensor,
    attended: Tensor,
    cos_sin: CosSin,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """From one layer's attention output to the next layer's input x and queries; the caches are the next layer's."""
    x = layer.post_attention(x, attended)
    return x, qkv_to_cache(next_layer, x, cos_sin, keys, values, slots)


def layer_to_qkv(layer: DecoderLayer, next_layer: DecoderLayer, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """`layer_to_layer` as far as the QKV projection: the next layer's input, and (R, N, (H + 2 G) D)."""
    x = layer.post_attention(x, attended)
    return x, next_layer.project_qkv(x)


def finish_last_layer(layer: DecoderLayer, final_norm: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    """From the last layer's attention output to normed features."""
    return final_norm.forward(layer.post_attention(x, attended))


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """The functions that `run_layers` calls: eager ones, compiled ones that all layers share, or fused kernels."""

    qkv_to_cache: Callable[..., Tensor] = qkv_to_cache
    layer_to_layer: Callable[..., tuple[Tensor, Tensor]] = layer_to_layer
    finish_last_layer: Callable[[DecoderLayer, nn.Module, Tensor, Tensor], Tensor] = finish_last_layer
    attention_bias: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = attention_bias
    logits: Callable[[Transformer, Tensor], Tensor] = Transformer.logits
    supports: Callable[[Arch, Tensor], bool] = lambda arch, x: True
    few_rows: LayerFunctions | None = None  # used instead of these for inputs that they support
    is_compiled: bool = False  # whether new shapes are compiled when they first occur

    def select(self, arch: Arch, x: Tensor) -> LayerFunctions:
        """The functions for inputs x (R, N, dim)."""
        return self.few_rows if self.few_rows is not None and self.few_rows.supports(arch, x) else self


EAGER = LayerFunctions()


@dataclass(frozen=True, slots=True)
class CacheView:
    """Where each layer writes its new keys and values, and how it attends to the cache."""

    keys: Sequence[Tensor]  # of each layer (R * G * L, D)
    values: Sequence[Tensor]
    slots: Tensor  # (R, N, G)
    attend: Callable[[int, Tensor], Tensor]  # (layer, q (R, N, H, D)) -> (R, N, H * D)


def run_layers(
    net: Transformer, x: Tensor, cos_sin: Tensor, cache: CacheView, functions: LayerFunctions = EAGER
) -> Tensor:
    """Run a decoder over a KV cache: embeddings (R, N, dim) and cos_sin (R, N, 2, D) to features (R, N, dim)."""
    rope, functions = split_cos_sin(cos_sin), functions.select(net.arch, x)
    layers: list[DecoderLayer] = list(net.blocks)  # type: ignore[arg-type]
    q = functions.qkv_to_cache(layers[0], x, rope, cache.keys[0], cache.values[0], cache.slots)
    for index, (layer, next_layer) in enumerate(pairwise(layers)):
        attended = cache.attend(index, q)
        next_cache = cache.keys[index + 1], cache.values[index + 1], cache.slots
        x, q = functions.layer_to_layer(layer, next_layer, x, attended, rope, *next_cache)
    return functions.finish_last_layer(layers[-1], net.norm, x, cache.attend(len(layers) - 1, q))
