# ruff: noqa: N803
"""A decoder's layer for a few nodes on a GPU: four products, and one kernel between them and attention.

With few rows a product takes as long as reading its matrix, and everything around it as long as a kernel takes at
least. So gates, residuals and norms are part of the products. A norm divides by the size of a row, which is known when
the row is; so the product that makes a row also scales it and sums up its squares, and the one that reads it divides
what comes out. Queries and keys are normed and turned, and keys and values written to the cache, by one more kernel.

For bfloat16, in which a row that was not divided yet cannot overflow. Needs triton.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn

from underdraw.nn.layer_functions import LayerFunctions
from underdraw.nn.rope import CosSin
from underdraw.nn.row_invariant import Linear
from underdraw.nn.transformer import Arch, DecoderLayer, HeadNorm, RMSNorm, Transformer

Heads = Callable[[DecoderLayer, Tensor], Tensor]
Joined = Callable[[DecoderLayer, DecoderLayer, Tensor, Tensor], tuple[Tensor, Tensor]]
TileConfig = tuple[int, int, int, int, int]
"""Outputs and inputs of a block, warps, stages that are on their way, and shares of the inputs."""
MOST = 32  # rows; from there on other kernels are as fast
_LEAST = 99 * 1024  # bytes of shared memory that a block may have on any GPU with bfloat16


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _flipped(w, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Outputs and inputs of a weight, or of S shares of it, the other way round."""
    if S == 1:
        return tl.trans(w)
    else:
        return tl.trans(w, 0, 2, 1)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _product(  # type: ignore[no-untyped-def]
    x, weight, squares, residual, scale, out, scaled, sums, rows, outputs, inputs, parts, eps, NORM: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Some outputs of all rows: x (rows, inputs) times weight (outputs, inputs), transposed.

    Gated, the weight has twice as many outputs, and the second half is multiplied by the first, which passes a SiLU.
    """
    m, n, p = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, P)
    if S == 1:
        k, r, o = tl.arange(0, K)[None, :], m[:, None], n[:, None]
        total = tl.zeros([M, N], tl.float32)
        other = tl.zeros([M, N], tl.float32)
    else:  # each warp has a share of the inputs, so that its sums wait for themselves less often
        k = tl.arange(0, S)[:, None, None] * (K // S) + tl.arange(0, K // S)[None, None, :]
        r, o = m[None, :, None], n[None, :, None]
        total = tl.zeros([S, M, N], tl.float32)
        other = tl.zeros([S, M, N], tl.float32)
    row = x + r * inputs + k
    line = weight + (o % outputs) * inputs + k  # what lies past the end is computed and not stored
    if NORM:
        square = tl.load(squares + p[:, None] * M + m, mask=p[:, None] < parts, other=0.0)
    for start in range(0, inputs, K):
        inside = start + k < inputs
        a = tl.load(row + start, mask=(r < rows) & inside, other=0.0)
        w = tl.load(line + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.dot(a, _flipped(w, S), total, input_precision="ieee")
        if GATED:
            after = line + outputs * inputs + start
            w = tl.load(after, mask=inside, other=0.0, eviction_policy="evict_first")
            other = tl.dot(a, _flipped(w, S), other, input_precision="ieee")
    if S > 1:
        total = tl.sum(total, 0)
        other = tl.sum(other, 0)
    if NORM:
        size = tl.rsqrt(tl.sum(square, 0) / inputs + eps)[:, None]
        total *= size
        other *= size
    if GATED:
        total = total / (1 + tl.exp(-total)) * other
    there = (m[:, None] < rows) & (n < outputs)
    place = m[:, None] * outputs + n
    if RESIDUAL:
        total += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    found = total.to(out.dtype.element_ty)
    tl.store(out + place, found, mask=there)
    if SCALED:
        rounded = tl.where(there, found.to(tl.float32), 0.0)
        g = tl.load(scale + n, mask=n < outputs, other=0.0).to(tl.float32)
        tl.store(scaled + place, (rounded * g[None, :]).to(out.dtype.element_ty), mask=there)
        tl.store(sums + tl.program_id(0) * M + m, tl.sum(rounded * rounded, 1))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _normed(x, y, d, o, inside, weight, bias, head, D: tl.constexpr, LAYER: tl.constexpr, EACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads and their counterparts, normed and scaled."""
    if LAYER:
        mean = (tl.sum(x, 1) / D)[:, None]
        x = tl.where(inside, x - mean, 0.0)
        y = tl.where(inside, y - mean, 0.0)
    size = tl.rsqrt(tl.sum(x * x, 1) / D + 1e-5)[:, None]
    first = head[:, None] * D if EACH else head[:, None] * 0
    x = x * size * tl.load(weight + first + d, mask=inside, other=0.0).to(tl.float32)
    y = y * size * tl.load(weight + first + o, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        x += tl.load(bias + first + d, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(bias + first + o, mask=inside, other=0.0).to(tl.float32)
    return x, y


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _place(  # type: ignore[no-untyped-def]
    heads, cos, sin, q_weight, q_bias, k_weight, k_bias, queries, keys, values, slots, t_row, t_node, k_slot, v_slot,
    count, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr,
    LAYER: tl.constexpr, EACH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """N heads of a kind of one node: queries are stored, keys or values written to their slots of the cache."""
    m, least = tl.program_id(0), tl.program_id(1) * N
    head, d = least + tl.arange(0, N), tl.arange(0, W)
    inside = (d < D)[None, :]
    source = heads + (m * (H + 2 * G) + head[:, None]) * D
    x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    if least < H + G:
        o = (d + D // 2) % D if HALVES else d ^ 1
        y = tl.load(source + o, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            if least < H:
                x, y = _normed(x, y, d, o, inside, q_weight, q_bias, head, D, LAYER, EACH)
            else:
                x, y = _normed(x, y, d, o, inside, k_weight, k_bias, head - H, D, LAYER, EACH)
        turn = (m // count) * t_row + (m % count) * t_node + d
        x = x * tl.load(cos + turn, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x += y * tl.load(sin + turn, mask=d < D, other=0.0).to(tl.float32)[None, :]
        if least < H:
            tl.store(queries + (m * H + head[:, None]) * D + d, x.to(queries.dtype.element_ty), mask=inside)
        else:
            slot = tl.load(slots + m * G + head - H).to(tl.int64)[:, None]
            tl.store(keys + slot * k_slot + d, x.to(keys.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + m * G + head - H - G).to(tl.int64)[:, None]
        tl.store(values + slot * v_slot + d, x.to(values.dtype.element_ty), mask=inside)


def fits(arch: Arch, x: Tensor) -> bool:
    """True for nodes x (R, N, dim) that these kernels are made for."""
    few = x.shape[0] * x.shape[1] <= MOST
    return few and x.dtype == torch.bfloat16 and x.is_cuda and arch.norm != "post"


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows (R, N, dim) times the weight of a norm, and what their sizes follow from: sums of squares (P, M)."""

    rows: Tensor
    squares: Tensor
    eps: float


def product(
    x: Tensor | Scaled, weight: Tensor, *, gated: bool = False, residual: Tensor | None = None,
    norm: RMSNorm | None = None, shape: TileConfig | None = None,
) -> tuple[Tensor, Scaled | None]:  # fmt: skip
    """x (R, N, in) times weight (out, in), gated, plus the residual: (R, N, out); and the same as `norm` scales it."""
    inner, sizes = (x.rows, x) if isinstance(x, Scaled) else (x, None)
    rows, inputs = inner.shape[0] * inner.shape[1], inner.shape[2]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = inner.new_empty(*inner.shape[:2], outputs)
    n, k, warps, stages, shares = shape or _shape(outputs, inputs)
    m, blocks = max(16, triton.next_power_of_2(rows)), triton.cdiv(outputs, n)
    stages = min(stages, 1 + _room(inner.device) // ((m + n * (1 + gated)) * k * inner.element_size()))
    scaled = (
        None if norm is None else Scaled(torch.empty_like(out), out.new_empty(blocks, m, dtype=torch.float32), norm.eps)
    )
    parts = 1 if sizes is None else len(sizes.squares)
    with torch.cuda.device_of(inner):
        _product[(blocks,)](
            inner.contiguous(), weight.contiguous(), out if sizes is None else sizes.squares,
            out if residual is None else residual.contiguous(), out if norm is None else norm.weight, out,
            *((out, out) if scaled is None else (scaled.rows, scaled.squares)),
            rows, outputs, inputs, parts, 0.0 if sizes is None else sizes.eps, NORM=sizes is not None, GATED=gated,
            RESIDUAL=residual is not None, SCALED=scaled is not None, M=m, N=n, K=k, S=shares,
            P=triton.next_power_of_2(parts), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, scaled


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes that blocks on their way may take of a processor."""
    if device.type != "cuda":
        return _LEAST
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", _LEAST)


def _shape(outputs: int, inputs: int) -> TileConfig:
    """What was fastest on an H200: as many outputs together as leave work for all of its processors."""
    if outputs >= 8192:
        return 64, 128, 4, 4, 1
    if outputs >= 2048:
        return (32, 256, 4, 4, 4) if inputs > 2 * outputs else (32, 128, 4, 6, 1)
    return 16, 256, 4, 6, 4


def place(
    arch: Arch, heads: Tensor, turn: CosSin, norms: tuple[HeadNorm | None, HeadNorm | None], keys: Tensor,
    values: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Write keys and values of heads (R, N, (H + 2 G) D) to slots (R, N, G) of flat caches; queries (R, N, H, D)."""
    rows, count = heads.shape[:2]
    queries = torch.empty(rows, count, arch.heads, arch.width, dtype=heads.dtype, device=heads.device)
    cos, sin = (part.expand(rows, count, 1, arch.width) for part in turn)
    q, k = norms
    weights: list[Tensor] = [heads] * 4
    if q is not None and k is not None:
        weights = [w if w is not None else heads for w in (q.weight, q.bias, k.weight, k.bias)]
    together = 1 if rows * count <= MOST else math.gcd(arch.heads, arch.groups, 4)  # heads of a block
    with torch.cuda.device_of(heads):
        _place[(rows * count, (arch.heads + 2 * arch.groups) // together)](
            heads, cos, sin, *weights, queries, keys, values, slots.contiguous(), cos.stride(0), cos.stride(1),
            keys.stride(0), values.stride(0), count, H=arch.heads, G=arch.groups, D=arch.width,
            W=triton.next_power_of_2(arch.width), N=together, NORM=q is not None, LAYER=arch.qk_norm == "layer",
            EACH=arch.qk_norm_heads == "per_head", HALVES=arch.rope.pairing == "half", num_warps=1,
        )  # fmt: skip
    return queries


def placing(heads: Heads, joined: Joined) -> LayerFunctions:
    """Regions of which `place` is a part, given what makes heads of a block's input, and of what it attended to."""

    def enter(block: DecoderLayer, x: Tensor, turn: CosSin, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        norms = block.q_norm, block.k_norm
        return place(block.arch, heads(block, x), turn, norms, keys, values, slots)

    def between(
        block: DecoderLayer,
        after: DecoderLayer,
        x: Tensor,
        attended: Tensor,
        turn: CosSin,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x, found = joined(block, after, x, attended)
        return x, place(after.arch, found, turn, (after.q_norm, after.k_norm), keys, values, slots)

    return LayerFunctions(enter, between)


def _heads(block: DecoderLayer, x: Tensor) -> Tensor:
    return product(_normed_by(block.attention_norm, x), block.qkv.weight)[0]


def _joined(block: DecoderLayer, after: DecoderLayer, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    norm = after.attention_norm
    x, scaled = _after(block, x, attended, norm if isinstance(norm, RMSNorm) else None)
    return x, product(scaled or x, after.qkv.weight)[0]


def leave(block: DecoderLayer, norm: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    return _normed_by(norm, _after(block, x, attended, None)[0])


def logits(net: Transformer, features: Tensor) -> Tensor:
    own = isinstance(net.head, Linear) and net.head.bias is None
    return product(features, net.head.weight)[0].float() if own else net.logits(features)


def _after(block: DecoderLayer, x: Tensor, attended: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Scaled | None]:
    """What follows a block's attention, and the same as the next norm scales it."""
    x, scaled = product(attended, block.out.weight, residual=x, norm=block.ffn_norm)
    assert scaled is not None
    inner, _ = product(scaled, block.gate_up.weight, gated=True)
    return product(inner, block.down.weight, residual=x, norm=norm)


def _normed_by(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) if isinstance(norm, RMSNorm) else x


REGIONS = replace(placing(_heads, _joined), leave=leave, logits=logits, fits=fits)
