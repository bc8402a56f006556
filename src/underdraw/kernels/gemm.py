# ruff: noqa: N803
"""Row-invariant GEMM for a few rows, and the row-wise kernels around it. Needs Triton.

Every output is one sum over K, accumulated in float32 from the first input to the last and rounded once, whatever the
tile sizes and however many rows there are. A BLAS kernel that does not split K adds in the same order, so both give the
same bits (measured: docs/exactness.md); `underdraw.nn.row_invariant_gpu` checks that and picks the faster one.

Norms and gates run on one row a program, so a row never depends on the others either. Sums of squares are accumulated
in float64: their float32 value does not depend on the order of summation, which compilers choose.
"""

from __future__ import annotations

import functools

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

FEW_ROWS = 16  # up to here our kernel with gate and residual inside is faster than BLAS and separate kernels
MAX_COUNTERS = 2**16  # tiles whose programs can be counted
Tile = tuple[int, int, int, int, int]  # rows, outputs and inputs of a tile, warps and stages
_LARGE = 2**22  # weights of a matrix for which more tiles are worth a measurement
_MIN_SHARED_MEMORY = 99 * 1024  # bytes a block may use on any GPU with bfloat16


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _scale_rows(x, scale, gamma):  # type: ignore[no-untyped-def]
    """RMSNorm of rows from their 1 / rms: rounded before and after the weight, as the eager module does."""
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * gamma.to(tl.float32)).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _silu_gate(gate, up):  # type: ignore[no-untyped-def]
    """silu(gate) * up in float32, rounded once."""
    g = gate.to(tl.float32)
    return (g / (1 + tl.exp(-g)) * up.to(tl.float32)).to(gate.dtype)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _inverse_rms(square_sum, dim, eps):  # type: ignore[no-untyped-def]
    """1 / rms in float32 from a float64 sum of squares."""
    return tl.rsqrt((square_sum / dim).to(tl.float32) + eps)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def store_tile(  # type: ignore[no-untyped-def]
    total, up_total, residual, out, m, n, rows, outputs, GATED: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Round sums (M, N), gate them and add a residual, each rounded again, as separate kernels would."""
    value = total.to(out.dtype.element_ty)
    if GATED:
        value = _silu_gate(value, up_total.to(out.dtype.element_ty))
    stored = (m[:, None] < rows) & (n[None, :] < outputs)
    index = m[:, None].to(tl.int64) * outputs + n[None, :]
    if RESIDUAL:
        before = tl.load(residual + index, mask=stored, other=0.0).to(tl.float32)
        value = (before + value.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + index, value, mask=stored)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gemm(  # type: ignore[no-untyped-def]
    x, weight, residual, out, rows, outputs, inputs, GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of x (rows, inputs) @ weight (outputs, inputs)^T, gated, plus a residual."""
    m, n = tl.program_id(1) * M + tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    is_row = m[:, None] < rows
    total = tl.zeros([M, N], tl.float32)
    up_total = tl.zeros([M, N], tl.float32)
    x_row = x + m[:, None].to(tl.int64) * inputs + k[None, :]
    w_row = weight + (n[:, None] % outputs).to(tl.int64) * inputs + k[None, :]  # past the end: computed, not stored
    for start in range(0, inputs, K):
        inside = start + k[None, :] < inputs
        a = tl.load(x_row + start, mask=is_row & inside, other=0.0)
        w = tl.load(w_row + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
        if GATED:
            w = tl.load(w_row + outputs.to(tl.int64) * inputs + start, mask=inside, other=0.0,
                        eviction_policy="evict_first")  # fmt: skip
            up_total = tl.dot(a, tl.trans(w), up_total, input_precision="ieee")
    store_tile(total, up_total, residual, out, m, n, rows, outputs, GATED, RESIDUAL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add_rms_norm(  # type: ignore[no-untyped-def]
    x, y, gamma, total, normed, dim, eps, ADD: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr
):
    """One row: total = x + y, and its RMSNorm; without ADD the norm of x alone."""
    d = tl.arange(0, D)
    index, inside = tl.program_id(0).to(tl.int64) * dim + d, d < dim
    value = tl.load(x + index, mask=inside, other=0.0)
    if ADD:
        after = tl.load(y + index, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + after).to(total.dtype.element_ty)
        tl.store(total + index, value, mask=inside)
    if NORM:
        v = value.to(tl.float64)
        scale = _inverse_rms(tl.sum(v * v, 0), dim, eps)
        tl.store(normed + index, _scale_rows(value, scale, tl.load(gamma + d, mask=inside, other=0.0)), mask=inside)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gate_up(x, out, ffn, F: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up of some columns of one row of x (rows, 2 ffn)."""
    f = tl.program_id(1) * F + tl.arange(0, F)
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(x + row * 2 * ffn + f, mask=f < ffn, other=0.0)
    up = tl.load(x + row * 2 * ffn + ffn + f, mask=f < ffn, other=0.0)
    tl.store(out + row * ffn + f, _silu_gate(gate, up), mask=f < ffn)


def gemm(
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x (rows, in) @ weight (out, in)^T -> (rows, out).

    `gated` takes weight as (2 out, in), gate rows first; `residual` (rows, out) is added to the rounded product.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    m, n, k, warps, stages = tile or _tile(rows, outputs, inputs, x.dtype)
    stages = min(stages, 1 + shared_memory(x.device) // ((m + n * (1 + gated)) * k * x.element_size()))
    with torch.cuda.device_of(x):
        _gemm[(triton.cdiv(outputs, n), triton.cdiv(rows, m))](
            x.contiguous(), weight, out if residual is None else residual.contiguous(), out, rows, outputs, inputs,
            GATED=gated, RESIDUAL=residual is not None, M=m, N=n, K=k,
            num_warps=warps, num_stages=max(stages, 1),
        )  # fmt: skip
    return out


def arrival_counters(device: torch.device) -> Tensor:
    """Programs that have finished, by tile; every kernel leaves them at zero.

    Kernels of one stream run one after the other and share them. CUDA graphs have others, whichever stream captured
    them: two graphs must not run at the same time anyway, since they share their memory.
    """
    if device.type != "cuda":
        return _counters(device, 0)
    of_graphs = _counters(device, -1)  # allocated by the eager pass before the first capture
    if torch.cuda.is_current_stream_capturing():
        return of_graphs
    return _counters(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache  # kept forever: CUDA graphs read them
def _counters(device: torch.device, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that the tiles in flight may take."""
    if device.type != "cuda":
        return _MIN_SHARED_MEMORY
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _MIN_SHARED_MEMORY)


def other_tiles(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles that may be faster than the default one: more programs, or more loads in flight."""
    if rows <= 64 or dtype == torch.float32 or outputs * inputs < _LARGE:
        return ()
    return (128, 32, 128, 4, 4), (128, 64, 128, 8, 4)


def _tile(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tile:
    """The fastest tile of those timed on an H200."""
    if dtype == torch.float32:
        return (16, 32, 32, 4, 2) if rows <= FEW_ROWS else (64, 64, 32, 8, 2)
    if rows <= 16:
        if outputs < 2048:
            return 16, 16, 256, 4, 4
        return (16, 64, 128, 4, 4) if outputs >= 8192 else (16, 32, 256, 4, 4)
    if rows <= 32:
        return (32, 64, 128, 4, 4) if outputs >= 16384 else (32, 32, 128, 4, 4)
    if rows <= 64:
        return (64, 64, 128, 4, 4) if outputs >= 8192 else (64, 32, 128, 4, 4)
    return (128, 64, 64, 4, 4) if outputs >= 4096 else (128, 32, 128, 4, 3)


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x (..., dim)."""
    rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(x):
        _add_rms_norm[(rows,)](x, x, gamma, out, out, dim, eps, ADD=False, NORM=True, D=triton.next_power_of_2(dim),
                               num_warps=_row_warps(dim))  # fmt: skip
    return out


def add_rms_norm(x: Tensor, y: Tensor, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its RMSNorm, both (..., dim); without gamma the sum twice."""
    rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    x, y = x.contiguous(), y.contiguous()
    total = torch.empty_like(x)
    normed = total if gamma is None else torch.empty_like(x)
    with torch.cuda.device_of(x):
        _add_rms_norm[(rows,)](
            x, y, x if gamma is None else gamma, total, normed, dim, eps, ADD=True, NORM=gamma is not None,
            D=triton.next_power_of_2(dim), num_warps=_row_warps(dim),
        )  # fmt: skip
    return total, normed


def silu_gate(x: Tensor) -> Tensor:
    """silu(gate) * up of x (..., 2 ffn), gate first -> (..., ffn)."""
    x = x.contiguous()
    rows, ffn = x.numel() // x.shape[-1], x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], ffn, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        _gate_up[(rows, triton.cdiv(ffn, 1024))](x, out, ffn, F=1024, num_warps=4)
    return out


def _row_warps(dim: int) -> int:
    return 8 if dim >= 2048 else 4
