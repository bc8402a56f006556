"""Layer functions for a GPU whose rows have the same bits however many rows a pass has. Importing it needs Triton.

A GEMM sums over K in one fixed order: by our own kernel, or by a BLAS kernel that does not split K, which adds in the
same order. Whether it does is checked for every shape that occurs, and the fastest of BLAS and some tiles of our kernel
is used. Norms, gates, RoPE and the cache write work on one row at a time; attention is `kernels.tree_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.kernels.gemm import FEW_ROWS, Tile, add_rms_norm, gemm, other_tiles, rms_norm, silu_gate
from underdraw.kernels.quantized_gemm import quantized_gemm
from underdraw.nn.fused_layers import with_cache_kernel
from underdraw.nn.layer_functions import LayerFunctions
from underdraw.nn.linear import Linear
from underdraw.nn.memory import free_bytes
from underdraw.nn.quantized_weight import QuantizedWeight, group_size, plane_width
from underdraw.nn.transformer import DecoderLayer, RMSNorm, Transformer

_REPEATS = 10  # timed calls when a GEMM is chosen
_COPIES_BYTES = (
    2**27
)  # of a weight that these calls read in turn: more than the L2 cache of a GPU, which no pass finds warm
Kernel = Literal["blas"] | Tile | None  # None: our kernel with its default tile
_kernels: dict[tuple[int, int, int, torch.dtype, torch.device], Kernel] = {}


@contextmanager
def unsplit_blas() -> Iterator[None]:
    """Make cuBLASLt multiply without splitting K; where torch cannot, `_measure` sees it in the bits."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    flags = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, flag) for flag in flags]
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        for flag in flags:
            try:
                setattr(matmul, flag, (False, False))
            except (TypeError, RuntimeError):
                setattr(matmul, flag, False)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(matmul, flag, value)
        torch.backends.cuda.preferred_blas_library(library)


def linear(x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
    """x (..., in) @ weight (out, in)^T -> (..., out), each row with the same bits for any number of rows."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, QuantizedWeight):
        return _fused(rows, weight).view(*x.shape[:-1], -1)
    return _multiply(rows, weight, _choose_kernel(rows, weight)).view(*x.shape[:-1], -1)


def _fused(
    x: Tensor, weight: Tensor | QuantizedWeight, *, gated: bool = False, residual: Tensor | None = None
) -> Tensor:
    """x (rows, in) @ weight (out, in)^T by our kernels, gated, plus a residual."""
    if isinstance(weight, QuantizedWeight) and x.dtype == torch.float32:
        # Without tensor cores the tiles of the quantised kernel do not fit into registers.
        weight = weight.dequantize().contiguous()
    if isinstance(weight, QuantizedWeight):
        words, inputs = weight.to_words(), weight.inputs
        parts = words.values, words.scale, words.format, plane_width(inputs), group_size(inputs)
        return quantized_gemm(x, *parts, gated=gated, residual=residual)
    return gemm(x, weight, gated=gated, residual=residual)


def _blas(rows: Tensor, weight: Tensor) -> Tensor:
    with unsplit_blas():
        return F.linear(rows, weight)


def _multiply(rows: Tensor, weight: Tensor, kernel: Kernel) -> Tensor:
    return _blas(rows, weight) if kernel == "blas" else gemm(rows, weight, tile=kernel)


def _choose_kernel(rows: Tensor, weight: Tensor) -> Kernel:
    """The fastest kernel with our kernel's bits for this shape; measured at the first eager pass."""
    if not rows.is_cuda or (len(rows) <= FEW_ROWS and rows.dtype != torch.float32):
        return None
    key = (len(rows), *weight.shape, rows.dtype, rows.device)
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            return None
        _kernels[key] = _measure(rows, weight)
    return _kernels[key]


def _measure(rows: Tensor, weight: Tensor) -> Kernel:
    """Compare the bits on random inputs, then the times."""
    generator = torch.Generator(device=rows.device).manual_seed(0)
    x = torch.randn(rows.shape, generator=generator, device=rows.device, dtype=torch.float32).to(rows.dtype)
    expected = gemm(x, weight)
    outputs, inputs = weight.shape
    candidates: list[Kernel] = [None, "blas", *other_tiles(len(rows), outputs, inputs, rows.dtype)]
    equal = [kernel for kernel in candidates if torch.equal(_multiply(x, weight, kernel), expected)]
    count = min(_COPIES_BYTES // (weight.numel() * weight.element_size()), _REPEATS)
    has_memory = (free_bytes(rows.device) or 0) > 8 * _COPIES_BYTES
    weights = [weight, *(weight.clone() for _ in range(count - 1 if has_memory else 0))]
    return min(equal, key=lambda kernel: _milliseconds(x, weights, kernel)) if len(equal) > 1 else None


def _milliseconds(x: Tensor, weights: Sequence[Tensor], kernel: Kernel) -> float:
    """Time of `_REPEATS` products on the device, launched from a CUDA graph so that the host does not count."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for index in range(_REPEATS):
            _multiply(x, weights[index % len(weights)], kernel)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight, norm.eps) if isinstance(norm, RMSNorm) else x


def _add_norm(x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    if isinstance(norm, RMSNorm):
        return add_rms_norm(x, y, norm.weight, norm.eps)
    return add_rms_norm(x, y, None, 0.0)


def _post_attention(layer: DecoderLayer, x: Tensor, attended: Tensor, next_norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Output projection and FFN of a layer: its output and, normed by `next_norm`, the input of the next GEMM."""
    if layer.arch.norm == "post":
        x = x + _norm(layer.attention_norm, linear(attended, layer.out.weight))
        hidden = silu_gate(linear(x, layer.gate_up.weight))
        x = x + _norm(layer.ffn_norm, linear(hidden, layer.down.weight))
        return x, _norm(next_norm, x)
    if layer.arch.norm == "sandwich":
        x = x + _norm(layer.attention_out_norm, linear(attended, layer.out.weight))
        hidden = silu_gate(linear(_norm(layer.ffn_norm, x), layer.gate_up.weight))
        x = x + _norm(layer.ffn_out_norm, linear(hidden, layer.down.weight))
        return x, _norm(next_norm, x)
    rows = x.shape[0] * x.shape[1]
    if rows <= FEW_ROWS or isinstance(layer.gate_up.weight, QuantizedWeight):
        shape, x = x.shape, x.reshape(rows, -1)
        x = _fused(attended.reshape(rows, -1), layer.out.weight, residual=x)
        hidden = _fused(_norm(layer.ffn_norm, x), layer.gate_up.weight, gated=True)
        x = _fused(hidden, layer.down.weight, residual=x).view(shape)
        return x, _norm(next_norm, x)
    x, normed = _add_norm(x, linear(attended, layer.out.weight), layer.ffn_norm)
    hidden = silu_gate(linear(normed, layer.gate_up.weight))
    return _add_norm(x, linear(hidden, layer.down.weight), next_norm)


def _project_qkv(layer: DecoderLayer, x: Tensor) -> Tensor:
    return _qkv(layer, _norm(_input_norm(layer), x))


def _qkv(layer: DecoderLayer, normed: Tensor) -> Tensor:
    qkv = linear(normed, layer.qkv.weight)
    return qkv if layer.qkv_bias is None else qkv + layer.qkv_bias


def _input_norm(layer: DecoderLayer) -> nn.Module:
    """The norm in front of a layer's QKV projection."""
    return nn.Identity() if layer.arch.norm == "post" else layer.attention_norm


def _layer_to_qkv(layer: DecoderLayer, next_layer: DecoderLayer, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    x, normed = _post_attention(layer, x, attended, _input_norm(next_layer))
    return x, _qkv(next_layer, normed)


def _finish_last_layer(layer: DecoderLayer, final_norm: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    return _post_attention(layer, x, attended, final_norm)[1]


def _logits(net: Transformer, features: Tensor) -> Tensor:
    head = net.head
    if isinstance(head, Linear):
        out = linear(features, head.weight)
        return (out if head.bias is None else out + head.bias).float()
    hidden = (linear(features, head.hidden.weight) + head.hidden.bias).float()
    hidden = (hidden * 0.5 * (1 + torch.erf(hidden * 2**-0.5))).to(features.dtype)
    return (linear(hidden, head.out.weight) + head.out.bias).float()


_WITH_CACHE = with_cache_kernel(_project_qkv, _layer_to_qkv)
ROW_INVARIANT = LayerFunctions(_WITH_CACHE.qkv_to_cache, _WITH_CACHE.layer_to_layer, _finish_last_layer, logits=_logits)
