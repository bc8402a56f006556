"""Layer functions on the Triton kernels of `kernels.fused_layer`. Importing it needs triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.kernels import fused_layer
from underdraw.kernels.fused_layer import DeferredNorm, HeadConfig, fused_linear
from underdraw.nn.layer_functions import LayerFunctions
from underdraw.nn.linear import Linear, PackedLinear, QuantizedLinear
from underdraw.nn.rope import CosSin
from underdraw.nn.transformer import Arch, DecoderLayer, RMSNorm, Transformer

ProjectQKV = Callable[[DecoderLayer, Tensor], Tensor]
LayerToQKV = Callable[[DecoderLayer, DecoderLayer, Tensor, Tensor], tuple[Tensor, Tensor]]


def _write_cache(
    layer: DecoderLayer, qkv: Tensor, cos_sin: CosSin, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """`fused_layer.qkv_to_cache` with the heads and norms of a layer."""
    arch, q, k = layer.arch, layer.q_norm, layer.k_norm
    weights = (None,) * 4 if q is None or k is None else (q.weight, q.bias, k.weight, k.bias)
    config = HeadConfig(
        arch.heads,
        arch.num_kv_heads,
        arch.head_width,
        qk_norm=arch.qk_norm,
        per_head_norm=arch.qk_norm_heads == "per_head",
        half_pairing=arch.rope.pairing == "half",
    )
    return fused_layer.qkv_to_cache(qkv, cos_sin, weights, keys, values, slots, config)


def with_cache_kernel(project_qkv: ProjectQKV, layer_to_qkv: LayerToQKV) -> LayerFunctions:
    """Layer functions that end in the kernel for QK norm, RoPE and the cache write, after these projections."""

    def qkv_to_cache(layer: DecoderLayer, x: Tensor, *rope_and_cache: Any) -> Tensor:
        return _write_cache(layer, project_qkv(layer, x), *rope_and_cache)

    def layer_to_layer(
        layer: DecoderLayer, next_layer: DecoderLayer, x: Tensor, attended: Tensor, *rope_and_cache: Any
    ) -> tuple[Tensor, Tensor]:
        x, qkv = layer_to_qkv(layer, next_layer, x, attended)
        return x, _write_cache(next_layer, qkv, *rope_and_cache)

    return LayerFunctions(qkv_to_cache, layer_to_layer)


def _matrix(linear: PackedLinear | QuantizedLinear) -> Tensor:
    """The weight of a matrix that is not quantised; quantised decoders run with row-invariant kernels only."""
    assert isinstance(linear, PackedLinear)
    return linear.weight


def _project_qkv(layer: DecoderLayer, x: Tensor) -> Tensor:
    return _add_bias(fused_linear(_rms_norm(layer.attention_norm, x), _matrix(layer.qkv))[0], layer)


def _layer_to_qkv(layer: DecoderLayer, next_layer: DecoderLayer, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    norm = next_layer.attention_norm
    x, deferred = _post_attention(layer, x, attended, norm if isinstance(norm, RMSNorm) else None)
    return x, _add_bias(fused_linear(deferred or x, _matrix(next_layer.qkv))[0], next_layer)


def _add_bias(qkv: Tensor, layer: DecoderLayer) -> Tensor:
    return qkv if layer.qkv_bias is None else qkv + layer.qkv_bias


def _finish_last_layer(layer: DecoderLayer, final_norm: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    return _rms_norm(final_norm, _post_attention(layer, x, attended, None)[0])


def fused_logits(net: Transformer, features: Tensor) -> Tensor:
    """Float32 logits over the head's outputs; a head with a bias or a hidden layer is run eagerly."""
    if isinstance(net.head, Linear) and net.head.bias is None:
        return fused_linear(features, net.head.weight)[0].float()
    return net.logits(features)


def _post_attention(
    layer: DecoderLayer, x: Tensor, attended: Tensor, next_norm: RMSNorm | None
) -> tuple[Tensor, DeferredNorm | None]:
    """Output projection and FFN: the next layer's input, and the same for the GEMM behind its norm."""
    x, deferred = _linear_then_norm(attended, _matrix(layer.out), x, layer.ffn_norm)
    assert deferred is not None
    hidden, _ = fused_linear(deferred, _matrix(layer.gate_up), gated=True)
    return _linear_then_norm(hidden, _matrix(layer.down), x, next_norm)


def _linear_then_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm: RMSNorm | None
) -> tuple[Tensor, DeferredNorm | None]:
    if norm is None:
        return fused_linear(x, weight, residual=residual)
    return fused_linear(x, weight, residual=residual, norm_weight=norm.weight, norm_eps=norm.eps)


def _rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) if isinstance(norm, RMSNorm) else x


def _supports(arch: Arch, x: Tensor) -> bool:
    """True for inputs x (R, N, dim) that the kernels are written for."""
    few = x.shape[0] * x.shape[1] <= fused_layer.MAX_ROWS
    return few and x.dtype == torch.bfloat16 and x.is_cuda and arch.norm not in ("post", "sandwich")


_GEMMS = with_cache_kernel(_project_qkv, _layer_to_qkv)
FUSED = LayerFunctions(
    _GEMMS.qkv_to_cache, _GEMMS.layer_to_layer, _finish_last_layer, logits=fused_logits, supports=_supports
)
