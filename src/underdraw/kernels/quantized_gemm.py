# ruff: noqa: N803
"""Row-invariant GEMM with int8, fp8 or int4 weights that are dequantised inside the kernel. Needs Triton.

The inputs of an output are divided into segments that depend on the matrix alone. Each segment is summed in float32
from its first input to its last, and the sums of the segments are added in order. So the bits of a row do not depend on
the number of rows or the tile sizes. With few rows, where a GEMM takes as long as its chain of dependent instructions,
segments run side by side, and the last program of a tile to finish adds their sums up.

Quantised values (`nn.quantized_weight`) are exact in the dtype of the inputs. The scale of an int8 or fp8 output is
applied once, to the finished sum; the sum of an int4 group is scaled before it is added, by one FMA. A weight is read
in words of 16 bits, which hold one value of each of two or four consecutive blocks of inputs ("planes"): with loads of
8 bits Triton orders the inputs of an instruction differently for few and for many rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from underdraw.kernels.gemm import MAX_COUNTERS, arrival_counters, shared_memory, store_tile

PLANES = {"int8": 2, "fp8": 2, "int4": 4}  # values in a word of 16 bits
_BUSY_PROGRAMS = 264  # programs that keep an H200 busy

# Inline PTX: a plane of two words to two bfloat16 values, at a fraction of the instructions of Triton's conversions.
# int8: 0x43uu is 128 + the low 7 bits, or 256 with the sign bit alone; their difference is the signed value.
_INT8_PLANES = tl.constexpr(
    tuple(
        f"""{{
    .reg .b32 a, c, p, t;
    mov.b32 c, 0xbf80bf80;
    shr.b32 t, $1, {8 * plane};
    lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 p, t, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, p, c, a;
}}"""
        for plane in range(2)
    )
)
# fp8: sign, exponent and mantissa moved to those of a bfloat16, whose exponent bias is larger by 120.
_FP8_PLANES = tl.constexpr(
    tuple(
        f"""{{
    .reg .b32 a, c, s, z;
    mov.b32 c, 0x7b807b80;
    mov.b32 z, 0x80008000;
    {"shl.b32 a, $1, 4; shl.b32 s, $1, 8;" if plane == 0 else "shr.b32 a, $1, 4; mov.b32 s, $1;"}
    and.b32 a, a, 0x07f007f0;
    lop3.b32 a, s, z, a, 0xea;
    fma.rn.bf16x2 $0, a, c, z;
}}"""
        for plane in range(2)
    )
)
# int4: 0x430n is 128 + n, and n is the value plus 8.
_INT4_PLANES = tl.constexpr(
    tuple(
        f"""{{
    .reg .b32 a, c, z;
    mov.b32 c, 0x3f803f80;
    mov.b32 z, 0xc308c308;
    shr.b32 a, $1, {4 * plane};
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, a, c, z;
}}"""
        for plane in range(4)
    )
)


class QuantizedTile(NamedTuple):
    """Tile sizes of a GEMM."""

    rows: int
    outputs: int
    warps: int
    stages: int
    weight_first: bool = False  # whether the weight is the left operand of the tensor cores


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _plane(word, dtype: tl.constexpr, PLANE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A plane of 16-bit words as exact values of `dtype`, without their scale."""
    if ASM and dtype == tl.bfloat16:
        if FORMAT == "int8":
            int8: tl.constexpr = _INT8_PLANES[PLANE]
            value = tl.inline_asm_elementwise(int8, "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif FORMAT == "fp8":
            fp8: tl.constexpr = _FP8_PLANES[PLANE]
            value = tl.inline_asm_elementwise(fp8, "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            int4: tl.constexpr = _INT4_PLANES[PLANE]
            value = tl.inline_asm_elementwise(int4, "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif FORMAT == "int4":
        value = (((word.to(tl.int32) >> (4 * PLANE)) & 15) - 8).to(tl.float32).to(dtype)
    else:
        byte = (word.to(tl.int32) >> (8 * PLANE)) & 255
        if FORMAT == "int8":
            value = ((byte ^ 128) - 128).to(tl.float32).to(dtype)
        else:
            bits = ((byte & 128) << 24) | ((byte & 127) << 20)
            value = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2 ** 120
    return value


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_product(a, w, total, WEIGHT_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """total + a (M, K) times w (N, K) transposed: (M, N), or (N, M) with the weight first."""
    if WEIGHT_FIRST:
        return tl.dot(w, tl.trans(a), total, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(w), total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_block(  # type: ignore[no-untyped-def]
    total, x_row, word, is_row, start, inputs, scales, group, groups, dtype: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr, BLOCK: tl.constexpr, GROUP_PLANES: tl.constexpr, ASM: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """total plus the products of all planes of some words, from the first input to the last."""
    k = tl.arange(0, BLOCK)[None, :]
    part = total
    for plane in tl.static_range(PLANES):
        column = start + plane * BLOCK
        a = tl.load(x_row + column, mask=is_row & (column + k < inputs), other=0.0)
        if FORMAT == "int4" and plane % GROUP_PLANES == 0:
            part = tl.zeros(total.shape, tl.float32)
        part = _add_product(a, _plane(word, dtype, plane, FORMAT, ASM), part, WEIGHT_FIRST)
        if FORMAT == "int4" and plane % GROUP_PLANES == GROUP_PLANES - 1:
            index = group + plane // GROUP_PLANES
            scale = tl.load(scales + index, mask=index + tl.zeros(scales.shape, tl.int32) < groups, other=0.0)
            scale = scale[:, None] if WEIGHT_FIRST else scale[None, :]
            total = tl.fma(part, tl.broadcast_to(scale, total.shape), total)
    return total if FORMAT == "int4" else part


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _segment_sums(  # type: ignore[no-untyped-def]
    x_row, w_row, w_up, s_row, s_up, is_row, inputs, groups, first, last, dtype: tl.constexpr, FORMAT: tl.constexpr,
    PLANES: tl.constexpr, BLOCK: tl.constexpr, GROUP_PLANES: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, ASM: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """Sums of the blocks from `first` to `last`; those of the second half of a gated weight too."""
    total = tl.zeros([N, M] if WEIGHT_FIRST else [M, N], tl.float32)
    up_total = tl.zeros([N, M] if WEIGHT_FIRST else [M, N], tl.float32)
    for block in range(first, last):
        start, group = block * (PLANES * BLOCK), block * (PLANES // GROUP_PLANES)
        word = tl.load(w_row + block * BLOCK, eviction_policy="evict_first")
        total = _add_block(
            total, x_row, word, is_row, start, inputs, s_row, group, groups, dtype, FORMAT, PLANES, BLOCK, GROUP_PLANES,
            ASM, WEIGHT_FIRST,
        )  # fmt: skip
        if GATED:
            word = tl.load(w_row + w_up + block * BLOCK, eviction_policy="evict_first")
            up_total = _add_block(
                up_total, x_row, word, is_row, start, inputs, s_row + s_up, group, groups, dtype, FORMAT, PLANES, BLOCK,
                GROUP_PLANES, ASM, WEIGHT_FIRST,
            )  # fmt: skip
    if WEIGHT_FIRST:
        total, up_total = tl.trans(total), tl.trans(up_total)
    return total, up_total


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator,unused-ignore]
def _quantized_gemm(  # type: ignore[no-untyped-def]
    x, weight, scale, residual, out, part, arrived, rows, outputs, inputs, groups, blocks, per_segment,
    FORMAT: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, GROUP_PLANES: tl.constexpr,
    SEGMENTS: tl.constexpr, PARALLEL: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, ASM: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile of x (rows, inputs) @ weight (outputs, blocks of words)^T, gated, plus a residual."""
    m, n = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, BLOCK)[None, :]
    row = (n % outputs).to(tl.int64)  # past the end: computed, not stored
    words = blocks * BLOCK
    x_row, w_row = x + m[:, None].to(tl.int64) * inputs + k, weight + row[:, None] * words + k
    w_up = outputs.to(tl.int64) * words
    s_row, s_up = scale + row * groups, outputs.to(tl.int64) * groups
    is_row = m[:, None] < rows
    dtype = x.dtype.element_ty
    if PARALLEL:
        first = tl.program_id(2) * per_segment
        total, up_total = _segment_sums(
            x_row, w_row, w_up, s_row, s_up, is_row, inputs, groups, first, tl.minimum(first + per_segment, blocks),
            dtype, FORMAT, PLANES, BLOCK, GROUP_PLANES, GATED, M, N, ASM, WEIGHT_FIRST,
        )  # fmt: skip
        is_last = True
        if SEGMENTS > 1:
            stored = is_row & (n[None, :] < outputs)
            index = m[:, None].to(tl.int64) * outputs + n[None, :]
            size = rows.to(tl.int64) * outputs
            mine = part + tl.program_id(2) * (size * (1 + GATED)) + index
            tl.store(mine, total, mask=stored)
            if GATED:
                tl.store(mine + size, up_total, mask=stored)
            tl.debug_barrier()
            counter = arrived + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SEGMENTS - 1
            if is_last:
                tl.store(counter, 0)
                total = tl.zeros([M, N], tl.float32)
                up_total = tl.zeros([M, N], tl.float32)
                for segment in range(SEGMENTS):
                    other = part + segment * (size * (1 + GATED)) + index
                    total += tl.load(other, mask=stored, other=0.0, cache_modifier=".cg")
                    if GATED:
                        up_total += tl.load(other + size, mask=stored, other=0.0, cache_modifier=".cg")
    else:
        is_last = True
        total = tl.zeros([M, N], tl.float32)
        up_total = tl.zeros([M, N], tl.float32)
        for segment in range(SEGMENTS):
            first = segment * per_segment
            sums, up_sums = _segment_sums(
                x_row, w_row, w_up, s_row, s_up, is_row, inputs, groups, first, tl.minimum(first + per_segment, blocks),
                dtype, FORMAT, PLANES, BLOCK, GROUP_PLANES, GATED, M, N, ASM, WEIGHT_FIRST,
            )  # fmt: skip
            total += sums
            up_total += up_sums
    if is_last:
        if FORMAT == "int8" or FORMAT == "fp8":
            total *= tl.load(scale + n, mask=n < outputs, other=0.0)[None, :]
            if GATED:
                up_total *= tl.load(scale + outputs + n, mask=n < outputs, other=0.0)[None, :]
        store_tile(total, up_total, residual, out, m, n, rows, outputs, GATED, RESIDUAL)


def segment_inputs(outputs: int, inputs: int) -> int:
    """Inputs of a segment: a function of the matrix alone. Narrow matrices have more segments."""
    count = 2 if outputs >= 8192 else 4
    return max(-(-inputs // count // 512), 1) * 512


def quantized_gemm(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    weight_format: str,
    plane_width: int,
    group_size: int,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    tile: QuantizedTile | None = None,
) -> Tensor:
    """x (rows, in) @ weight (out, in)^T -> (rows, out), from the words (out, W) and scales of a `QuantizedWeight`.

    `plane_width` are the inputs of a plane, `group_size` those of an int4 group. `gated` takes the weight as
    (2 out, in), gate rows first; `residual` (rows, out) is added to the rounded product.
    """
    rows, inputs = x.shape
    outputs = words.shape[0] // 2 if gated else words.shape[0]
    tile, planes = tile or _tile(rows, outputs, inputs, weight_format, x.dtype, gated), PLANES[weight_format]
    groups = scale.shape[1] if scale.ndim == 2 else 1
    blocks = triton.cdiv(inputs, planes * plane_width)
    per_segment = max(segment_inputs(words.shape[0], inputs) // (planes * plane_width), 1)
    segments = triton.cdiv(blocks, per_segment)
    grid = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    is_parallel = segments > 1 and grid[0] * grid[1] < min(_BUSY_PROGRAMS, MAX_COUNTERS)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    part, arrived = out, out
    if is_parallel:
        part = torch.empty(segments, 1 + gated, rows, outputs, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    stage = plane_width * (tile.rows * planes * x.element_size() + tile.outputs * (1 + gated) * words.element_size())
    stages = max(min(tile.stages, (shared_memory(x.device) - 8192) // stage), 1)
    with torch.cuda.device_of(x):
        _quantized_gemm[(grid[0], grid[1], segments if is_parallel else 1)](
            x.contiguous(), words, scale, out if residual is None else residual.contiguous(), out, part, arrived, rows,
            outputs, inputs, groups, blocks, per_segment, FORMAT=weight_format, PLANES=planes, BLOCK=plane_width,
            GROUP_PLANES=max(group_size // plane_width, 1), SEGMENTS=segments, PARALLEL=is_parallel, GATED=gated,
            RESIDUAL=residual is not None, M=tile.rows, N=tile.outputs, ASM=x.is_cuda, WEIGHT_FIRST=tile.weight_first,
            num_warps=tile.warps, num_stages=stages,
        )  # fmt: skip
    return out


def _tile(rows: int, outputs: int, inputs: int, weight_format: str, dtype: torch.dtype, gated: bool) -> QuantizedTile:
    """The fastest of those timed on an H200.

    With the weight as the left operand its values are converted once, not by each of the warps that share the rows.
    """
    if dtype == torch.float32:  # only in Triton's interpreter: see `row_invariant_gpu`
        return QuantizedTile(16, 32, 4, 1)
    is_narrow, is_int4 = outputs < 4096, weight_format == "int4"
    if rows <= 16 and gated and not is_int4:
        return QuantizedTile(16, 32, 4, 4)
    if rows <= 8:
        if is_narrow or inputs > outputs:
            return QuantizedTile(8, 32, 2, 6, weight_first=True)
        return QuantizedTile(8, 64, 4, 4, weight_first=True)
    if rows <= 32:
        tile_rows = 16 if rows <= 16 else 32
        return QuantizedTile(tile_rows, 32, 4, 4) if is_narrow else QuantizedTile(tile_rows, 64, 4, 4, True)
    if gated and is_int4:
        return QuantizedTile(64, 128, 8, 3, weight_first=True)
    if gated and rows <= 64:
        return QuantizedTile(32, 64, 4, 4, weight_first=True)
    needs_registers = gated or is_int4 or outputs >= 8192
    return QuantizedTile(64 if rows <= 64 or needs_registers else 128, 64, 4, 3, weight_first=True)
