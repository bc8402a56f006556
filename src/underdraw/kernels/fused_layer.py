# ruff: noqa: N803
"""A decoder layer for a few rows: GEMMs with fused epilogues, and one kernel for QK norm, RoPE and the KV cache write.

With few rows a GEMM takes as long as reading its weight, and every elementwise kernel takes at least a launch. So
SwiGLU, residuals and RMS norms are fused into the GEMMs. A norm divides by the RMS of a row, which is complete only
when the whole row is; so the GEMM that writes a row also multiplies it by the norm's weight and sums up its squares,
and the GEMM that reads it divides its result (`DeferredNorm`).

For bfloat16, in which a row that is not divided yet cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from underdraw.kernels.gemm import shared_memory

MAX_ROWS = 32  # with more rows other kernels are as fast


class TileConfig(NamedTuple):
    """Tile sizes of a GEMM."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    split_k: int  # parts of the inputs that are summed up separately


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _transpose(w, SPLIT_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """A weight tile (N, K), or SPLIT_K of them, with inputs first."""
    if SPLIT_K == 1:
        return tl.trans(w)
    else:
        return tl.trans(w, 0, 2, 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _fused_linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, squares, residual, norm_weight,
    out, scaled_out, squares_out,
    rows, outputs, inputs, square_blocks, eps,
    DIVIDE_BY_RMS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, DEFER_NORM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT_K: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """N outputs of all rows: x (rows, inputs) times weight (outputs, inputs) transposed.

    Gated, the weight has twice as many outputs: silu(first half) * second half.
    """
    m, n, p = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, P)
    if SPLIT_K == 1:
        k, r, o = tl.arange(0, K)[None, :], m[:, None], n[:, None]
        total = tl.zeros([M, N], tl.float32)
        up = tl.zeros([M, N], tl.float32)
    else:  # each warp sums up a part of the inputs, which shortens the chain of dependent additions
        k = tl.arange(0, SPLIT_K)[:, None, None] * (K // SPLIT_K) + tl.arange(0, K // SPLIT_K)[None, None, :]
        r, o = m[None, :, None], n[None, :, None]
        total = tl.zeros([SPLIT_K, M, N], tl.float32)
        up = tl.zeros([SPLIT_K, M, N], tl.float32)
    x_tile = x + r * inputs + k
    weight_tile = weight + (o % outputs) * inputs + k  # outputs past the end are computed and not stored
    if DIVIDE_BY_RMS:
        square = tl.load(squares + p[:, None] * M + m, mask=p[:, None] < square_blocks, other=0.0)
    for start in range(0, inputs, K):
        is_input = start + k < inputs
        a = tl.load(x_tile + start, mask=(r < rows) & is_input, other=0.0)
        w = tl.load(weight_tile + start, mask=is_input, other=0.0, eviction_policy="evict_first")
        total = tl.dot(a, _transpose(w, SPLIT_K), total, input_precision="ieee")
        if GATED:
            up_tile = weight_tile + outputs * inputs + start
            w = tl.load(up_tile, mask=is_input, other=0.0, eviction_policy="evict_first")
            up = tl.dot(a, _transpose(w, SPLIT_K), up, input_precision="ieee")
    if SPLIT_K > 1:
        total = tl.sum(total, 0)
        up = tl.sum(up, 0)
    if DIVIDE_BY_RMS:
        inverse_rms = tl.rsqrt(tl.sum(square, 0) / inputs + eps)[:, None]
        total *= inverse_rms
        up *= inverse_rms
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    mask = (m[:, None] < rows) & (n < outputs)
    offset = m[:, None] * outputs + n
    if RESIDUAL:
        total += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + offset, result, mask=mask)
    if DEFER_NORM:
        rounded = tl.where(mask, result.to(tl.float32), 0.0)
        g = tl.load(norm_weight + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(scaled_out + offset, (rounded * g[None, :]).to(out.dtype.element_ty), mask=mask)
        tl.store(squares_out + tl.program_id(0) * M + m, tl.sum(rounded * rounded, 1))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _norm_heads(  # type: ignore[no-untyped-def]
    x, partner, d, partner_d, mask, weight, bias, head,
    D: tl.constexpr, LAYER_NORM: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """QK norm of heads x (N, W) and of the dimensions that RoPE pairs with theirs."""
    if LAYER_NORM:
        mean = (tl.sum(x.to(tl.float64), 1) / D).to(tl.float32)[:, None]  # float64: any order of summation will do
        x = tl.where(mask, x - mean, 0.0)
        partner = tl.where(mask, partner - mean, 0.0)
    inverse_rms = tl.rsqrt((tl.sum((x * x).to(tl.float64), 1) / D).to(tl.float32) + 1e-5)[:, None]
    first = head[:, None] * D if PER_HEAD else head[:, None] * 0
    x = x * inverse_rms * tl.load(weight + first + d, mask=mask, other=0.0).to(tl.float32)
    partner = partner * inverse_rms * tl.load(weight + first + partner_d, mask=mask, other=0.0).to(tl.float32)
    if LAYER_NORM:
        x += tl.load(bias + first + d, mask=mask, other=0.0).to(tl.float32)
        partner += tl.load(bias + first + partner_d, mask=mask, other=0.0).to(tl.float32)
    return x, partner


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _qkv_to_cache_kernel(  # type: ignore[no-untyped-def]
    qkv, cos, sin, q_weight, q_bias, k_weight, k_bias,
    queries, keys, values, slots,
    rope_row_stride, rope_node_stride, key_slot_stride, value_slot_stride, count,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
    QK_NORM: tl.constexpr, LAYER_NORM: tl.constexpr, PER_HEAD: tl.constexpr, HALF_PAIRING: tl.constexpr,
):  # fmt: skip
    """N heads of one node, all queries, all keys or all values: norm, rotate, and store or write to the cache."""
    m, first_head = tl.program_id(0), tl.program_id(1) * N
    head, d = first_head + tl.arange(0, N), tl.arange(0, W)
    mask = (d < D)[None, :]
    source = qkv + (m * (H + 2 * G) + head[:, None]) * D
    x = tl.load(source + d, mask=mask, other=0.0).to(tl.float32)
    if first_head < H + G:
        partner_d = (d + D // 2) % D if HALF_PAIRING else d ^ 1
        partner = tl.load(source + partner_d, mask=mask, other=0.0).to(tl.float32)
        if QK_NORM:
            if first_head < H:
                x, partner = _norm_heads(
                    x, partner, d, partner_d, mask, q_weight, q_bias, head, D, LAYER_NORM, PER_HEAD
                )
            else:
                x, partner = _norm_heads(
                    x, partner, d, partner_d, mask, k_weight, k_bias, head - H, D, LAYER_NORM, PER_HEAD
                )
        rope = (m // count) * rope_row_stride + (m % count) * rope_node_stride + d
        x = x * tl.load(cos + rope, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x += partner * tl.load(sin + rope, mask=d < D, other=0.0).to(tl.float32)[None, :]
        if first_head < H:
            tl.store(queries + (m * H + head[:, None]) * D + d, x.to(queries.dtype.element_ty), mask=mask)
        else:
            slot = tl.load(slots + m * G + head - H).to(tl.int64)[:, None]
            tl.store(keys + slot * key_slot_stride + d, x.to(keys.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + m * G + head - H - G).to(tl.int64)[:, None]
        tl.store(values + slot * value_slot_stride + d, x.to(values.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class DeferredNorm:
    """Rows times the weight of an RMS norm, not divided by their RMS yet, and the sums of squares that it takes."""

    rows: Tensor  # (R, N, dim)
    squares: Tensor  # (blocks, M) float32, one partial sum for each thread block that wrote a part of the rows
    eps: float


def fused_linear(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    tile: TileConfig | None = None,
) -> tuple[Tensor, DeferredNorm | None]:
    """x (R, N, in) times weight (out, in) transposed, SwiGLU if gated, plus the residual: (R, N, out).

    With a norm's weight also the result as input of that norm's GEMM.
    """
    inputs_tensor, norm = (x.rows, x) if isinstance(x, DeferredNorm) else (x, None)
    rows, inputs = inputs_tensor.shape[0] * inputs_tensor.shape[1], inputs_tensor.shape[2]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = inputs_tensor.new_empty(*inputs_tensor.shape[:2], outputs)
    tile = tile or _default_tile(outputs, inputs)
    m, blocks = max(16, triton.next_power_of_2(rows)), triton.cdiv(outputs, tile.outputs)
    stage_bytes = (m + tile.outputs * (1 + gated)) * tile.inputs * inputs_tensor.element_size()
    stages = min(tile.num_stages, 1 + shared_memory(inputs_tensor.device) // stage_bytes)
    deferred = None
    if norm_weight is not None:
        deferred = DeferredNorm(torch.empty_like(out), out.new_empty(blocks, m, dtype=torch.float32), norm_eps)
    square_blocks = 1 if norm is None else len(norm.squares)
    # Pointers that a kernel variant does not read are passed `out` as a placeholder.
    with torch.cuda.device_of(inputs_tensor):
        _fused_linear_kernel[(blocks,)](
            inputs_tensor.contiguous(), weight.contiguous(), out if norm is None else norm.squares,
            out if residual is None else residual.contiguous(), out if norm_weight is None else norm_weight,
            out, *((out, out) if deferred is None else (deferred.rows, deferred.squares)),
            rows, outputs, inputs, square_blocks, 0.0 if norm is None else norm.eps,
            DIVIDE_BY_RMS=norm is not None, GATED=gated, RESIDUAL=residual is not None, DEFER_NORM=deferred is not None,
            M=m, N=tile.outputs, K=tile.inputs, SPLIT_K=tile.split_k, P=triton.next_power_of_2(square_blocks),
            num_warps=tile.num_warps, num_stages=stages,
        )  # fmt: skip
    return out, deferred


def _default_tile(outputs: int, inputs: int) -> TileConfig:
    """What was fastest on an H200: as many outputs a tile as leave work for all of its multiprocessors."""
    if outputs >= 8192:
        return TileConfig(64, 128, 4, 4, 1)
    if outputs >= 2048:
        return TileConfig(32, 256, 4, 4, 4) if inputs > 2 * outputs else TileConfig(32, 128, 4, 6, 1)
    return TileConfig(16, 256, 4, 6, 4)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """How the fused QKV projection divides into heads, and what is applied to queries and keys."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: str  # "none", "layer" or "rms"
    per_head_norm: bool  # whether each head has its own norm weight
    half_pairing: bool  # RoPE pairs dimensions (i, i + D / 2), else (2i, 2i + 1)


def qkv_to_cache(
    qkv: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    norm_weights: Sequence[Tensor | None],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    config: HeadConfig,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to the cache, and return the queries (R, N, H, D).

    qkv is (R, N, (H + 2 G) D), the caches of one layer (R * G * L, D), slots (R, N, G) index their rows. The norm's
    weights are those of queries, their bias, those of keys and their bias, each (1 or heads, D), None where there is
    none.
    """
    rows, count = qkv.shape[:2]
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
    queries = torch.empty(rows, count, heads, width, dtype=qkv.dtype, device=qkv.device)
    cos, sin = (part.expand(rows, count, 1, width) for part in cos_sin)
    weights = [qkv if weight is None else weight for weight in norm_weights]  # None is not read: any pointer will do
    together = 1 if rows * count <= MAX_ROWS else math.gcd(heads, kv_heads, 4)  # heads of a thread block
    with torch.cuda.device_of(qkv):
        _qkv_to_cache_kernel[(rows * count, (heads + 2 * kv_heads) // together)](
            qkv, cos, sin, *weights, queries, keys, values, slots.contiguous(),
            cos.stride(0), cos.stride(1), keys.stride(0), values.stride(0), count,
            H=heads, G=kv_heads, D=width, W=triton.next_power_of_2(width), N=together,
            QK_NORM=config.qk_norm != "none", LAYER_NORM=config.qk_norm == "layer", PER_HEAD=config.per_head_norm,
            HALF_PAIRING=config.half_pairing, num_warps=1,
        )  # fmt: skip
    return queries
