# ruff: noqa: N803
"""Row-invariant GEMM with int8, fp8 or int4 weights that are dequantised inside the kernel. Needs Triton.

As in `kernels.gemm`, every output is one sum over K in float32 from the first input to the last, whatever the tile
sizes and the number of rows. Quantised values are exact in the dtype of the inputs. The scale of an int8 or fp8 output
is applied once, to the finished sum; int4 sums one group of inputs after the other and adds each, scaled, by one FMA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from underdraw.kernels.gemm import shared_memory, store_tile

# Inline PTX: the four bytes of a register to four bfloat16 in two. Triton converts one value after the other, at a
# quarter of the rate that reading int8 weights at full bandwidth needs.
# int8: 0x43uu is 128 + the low 7 bits, or 256 with the sign bit alone; their difference is the signed value.
_INT8_ASM = tl.constexpr("""{
    .reg .b32 a, b, c, p, q;
    mov.b32 c, 0xbf80bf80;
    prmt.b32 a, $2, 0x43434343, 0x4140;
    prmt.b32 b, $2, 0x43434343, 0x4342;
    and.b32 p, a, 0xff80ff80;
    and.b32 q, b, 0xff80ff80;
    and.b32 a, a, 0xff7fff7f;
    and.b32 b, b, 0xff7fff7f;
    fma.rn.bf16x2 $0, p, c, a;
    fma.rn.bf16x2 $1, q, c, b;
}""")
# fp8: sign, exponent and mantissa moved to those of a bfloat16, whose exponent bias is larger by 120.
_FP8_ASM = tl.constexpr("""{
    .reg .b32 a, b, c, p, q, z;
    mov.b32 c, 0x7b807b80;
    mov.b32 z, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 p, a, 0x80008000;
    and.b32 q, b, 0x80008000;
    shr.b32 a, a, 4;
    shr.b32 b, b, 4;
    and.b32 a, a, 0x07f007f0;
    and.b32 b, b, 0x07f007f0;
    or.b32 a, a, p;
    or.b32 b, b, q;
    fma.rn.bf16x2 $0, a, c, z;
    fma.rn.bf16x2 $1, b, c, z;
}""")
# int4: 0x430n is 128 + n, and n is the value plus 8.
_INT4_ASM = tl.constexpr("""{
    .reg .b32 a, b, c, z;
    mov.b32 c, 0x3f803f80;
    mov.b32 z, 0xc308c308;
    prmt.b32 a, $2, 0x43434343, 0x4140;
    prmt.b32 b, $2, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, a, c, z;
    fma.rn.bf16x2 $1, b, c, z;
}""")


class QuantizedTile(NamedTuple):
    """Tile sizes of a GEMM."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    weight_first: bool = False  # whether the weight is the left operand of the tensor cores


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dequantize(w, dtype: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of a weight as exact values of `dtype`; of int4 the lower halves of the bytes, without their scale."""
    if ASM and dtype == tl.bfloat16:
        if FORMAT == "int8":
            value = tl.inline_asm_elementwise(_INT8_ASM, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        elif FORMAT == "fp8":
            value = tl.inline_asm_elementwise(_FP8_ASM, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            value = tl.inline_asm_elementwise(_INT4_ASM, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif FORMAT == "int8":
        value = w.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    elif FORMAT == "fp8":
        wide = w.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        value = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2 ** 120
    else:
        value = (w.to(tl.float32) - 8).to(dtype)
    return value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _dot(a, w, total, WEIGHT_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + a (M, K) times w (N, K) transposed: (M, N), or (N, M) with the weight first."""
    if WEIGHT_FIRST:
        return tl.dot(w, tl.trans(a), total, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(w), total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _channel_scaled(total, scale, n, outputs, WEIGHT_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums times the scales of their outputs, as (M, N)."""
    if WEIGHT_FIRST:
        total = tl.trans(total)
    return total * tl.load(scale + n, mask=n < outputs, other=0.0)[None, :]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_group(  # type: ignore[no-untyped-def]
    total, a, w, scale, dtype: tl.constexpr, ASM: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """total plus the scaled sum over one group of int4 inputs."""
    part = _dot(a, _dequantize(w, dtype, "int4", ASM), tl.zeros(total.shape, tl.float32), WEIGHT_FIRST)
    if WEIGHT_FIRST:
        return tl.fma(part, tl.broadcast_to(scale[:, None], total.shape), total)
    else:
        return tl.fma(part, tl.broadcast_to(scale[None, :], total.shape), total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _channel_gemm(  # type: ignore[no-untyped-def]
    x, weight, scale, residual, out, rows, outputs, inputs, FORMAT: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ASM: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile of x (rows, inputs) @ weight (outputs, inputs)^T with one scale per output, gated, plus a residual."""
    m, n = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_row = m[:, None] < rows
    dtype = x.dtype.element_ty
    total = tl.zeros([N, M] if WEIGHT_FIRST else [M, N], tl.float32)
    up_total = total
    x_row = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    w_row = weight + (n[:, None] % outputs).to(tl.int64) * inputs + k[None, :]  # past the end: computed, not stored
    for start in range(0, inputs, K):
        inside = start + k[None, :] < inputs
        a = tl.load(x_row + start, mask=is_row & inside, other=0.0)
        w = tl.load(w_row + start, mask=inside, other=0, eviction_policy="evict_first")
        total = _dot(a, _dequantize(w, dtype, FORMAT, ASM), total, WEIGHT_FIRST)
        if GATED:
            w = tl.load(w_row + outputs.to(tl.int64) * inputs + start, mask=inside, other=0,
                        eviction_policy="evict_first")  # fmt: skip
            up_total = _dot(a, _dequantize(w, dtype, FORMAT, ASM), up_total, WEIGHT_FIRST)
    total = _channel_scaled(total, scale, n, outputs, WEIGHT_FIRST)
    if GATED:
        up_total = _channel_scaled(up_total, scale + outputs, n, outputs, WEIGHT_FIRST)
    store_tile(total, up_total, residual, out, m, n, rows, outputs, GATED, RESIDUAL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _group_gemm(  # type: ignore[no-untyped-def]
    x, weight, scale, residual, out, rows, outputs, inputs, pairs, GROUP: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """The same with int4 weights (outputs, pairs * GROUP): a byte holds an input of an even group and one of the next.

    Scales are (outputs, 2 * pairs); that of a group past the last input is 0.
    """
    m, n = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, GROUP)
    is_row = m[:, None] < rows
    dtype = x.dtype.element_ty
    total = tl.zeros([N, M] if WEIGHT_FIRST else [M, N], tl.float32)
    up_total = total
    x_row = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    row = (n % outputs).to(tl.int64)
    w_row, s_row = weight + row[:, None] * (pairs * GROUP) + k[None, :], scale + row * (2 * pairs)
    w_up, s_up = outputs.to(tl.int64) * (pairs * GROUP), outputs.to(tl.int64) * (2 * pairs)
    for pair in range(0, pairs):
        start = pair * (2 * GROUP)
        even = tl.load(x_row + start, mask=is_row & (start + k[None, :] < inputs), other=0.0)
        odd = tl.load(x_row + start + GROUP, mask=is_row & (start + GROUP + k[None, :] < inputs), other=0.0)
        w = tl.load(w_row + pair * GROUP, eviction_policy="evict_first")
        even_scale, odd_scale = tl.load(s_row + 2 * pair), tl.load(s_row + 2 * pair + 1)
        total = _add_group(total, even, w & 15, even_scale, dtype, ASM, WEIGHT_FIRST)
        total = _add_group(total, odd, w >> 4, odd_scale, dtype, ASM, WEIGHT_FIRST)
        if GATED:
            w = tl.load(w_row + w_up + pair * GROUP, eviction_policy="evict_first")
            even_scale, odd_scale = tl.load(s_row + s_up + 2 * pair), tl.load(s_row + s_up + 2 * pair + 1)
            up_total = _add_group(up_total, even, w & 15, even_scale, dtype, ASM, WEIGHT_FIRST)
            up_total = _add_group(up_total, odd, w >> 4, odd_scale, dtype, ASM, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        total, up_total = tl.trans(total), tl.trans(up_total)
    store_tile(total, up_total, residual, out, m, n, rows, outputs, GATED, RESIDUAL)


def quantized_gemm(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    weight_format: str,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    tile: QuantizedTile | None = None,
) -> Tensor:
    """x (rows, in) @ weight (out, in)^T -> (rows, out), from the bytes and scales of `nn.quantized_weight`.

    `gated` takes the weight as (2 out, in), gate rows first; `residual` (rows, out) is added to the rounded product.
    """
    rows, inputs = x.shape
    outputs = values.shape[0] // 2 if gated else values.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tile = tile or _tile(rows, outputs, x.dtype)
    is_int4 = weight_format == "int4"
    pairs = scale.shape[1] // 2 if is_int4 else 0
    block = values.shape[1] // pairs if is_int4 else min(tile.inputs, max(triton.next_power_of_2(inputs), 32))
    weight_bytes = tile.outputs * (1 + gated) * block
    stage = tile.rows * block * (1 + is_int4) * x.element_size() + weight_bytes
    stages = max(min(tile.stages, 1 + shared_memory(x.device) // stage), 1)
    grid = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    tensors = x.contiguous(), values, scale, out if residual is None else residual.contiguous(), out
    options = {
        "GATED": gated, "RESIDUAL": residual is not None, "M": tile.rows, "N": tile.outputs, "ASM": x.is_cuda,
        "WEIGHT_FIRST": tile.weight_first, "num_warps": tile.warps, "num_stages": stages,
    }  # fmt: skip
    with torch.cuda.device_of(x):
        if is_int4:
            _group_gemm[grid](*tensors, rows, outputs, inputs, pairs, GROUP=block, **options)
        else:
            _channel_gemm[grid](*tensors, rows, outputs, inputs, FORMAT=weight_format, K=block, **options)
    return out


def _tile(rows: int, outputs: int, dtype: torch.dtype) -> QuantizedTile:
    """Tile sizes by rows. The weight is always first: with rows first, Triton orders the inputs of 8-bit weights
    differently for few and for many rows."""
    if dtype == torch.float32:
        return QuantizedTile(16, 32, 32, 4, 2) if rows <= 16 else QuantizedTile(64, 64, 32, 8, 2)
    if rows <= 16:
        return QuantizedTile(16, 64, *((128, 4, 6) if outputs >= 8192 else (256, 4, 4)), weight_first=True)
    if rows <= 32:
        return QuantizedTile(32, 64, 256, 4, 4, weight_first=True)
    return QuantizedTile(128, 64, 128, 4, 3, weight_first=True)
