"""Row-invariant GEMMs on a CPU: the bits of a row do not depend on how many other rows are multiplied with it.

Exact speculative decoding needs a tree node to get the same logits as the same token decoded alone. A BLAS picks its
kernel by the shape of a product, and kernels differ in the order in which they add up. Four rules keep that order the
same (`benchmarks/invariance.py` measures what breaks them, docs/exactness.md explains them):

- weights are stored input-major, or packed: `PACK_WIDTH` outputs side by side, input-major, one pack after the other,
  which gives the same bits and is faster because memory is read in order;
- inner products longer than `max_inner_size()` are summed up chunk by chunk, since threads share longer ones, and
  units for 16-bit numbers (AMX) divide longer ones by the number of rows;
- a product has at least `min_rows()` rows and a multiple of `row_multiple()`; `linear` pads with zeros;
- attention sums up at most `sum_block()` positions at a time, so that the zeros of masked slots between them change
  nothing.

Where MKL has no fast kernels for the processor, matrices are packed for oneDNN instead, which needs none of the first
three rules (`nn.onednn`). How many rows and positions depends on the processor, so they are probed once per number of
threads, in some tens of milliseconds. Where no number of rows will do, all products have `max_rows()` rows: larger ones
are computed part by part. `row_invariant_gpu` does the same for GPUs.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from underdraw.nn import onednn
from underdraw.nn.quantized_weight import QuantizedWeight
from underdraw.plan import MAX_NODES

log = logging.getLogger(__name__)
PACK_WIDTH = 32  # of 16, 32, 64, 128 and 256 the fastest for two rows
# Candidates: minimum number of rows, a multiple of this, and the most rows, 0 for any number. The last one, products of
# one size, is for processors whose BLAS adds up in another order for almost every number: Intel's without AVX-512.
_ROW_RULES = ((2, 1, 0), (4, 4, 0), (8, 8, 0), (16, 16, 0), (4, 4, 4))
_SUM_BLOCKS = (256, 64)  # candidates: positions that are summed up at a time
_COLUMN_MULTIPLES = (1, 16)  # candidates: columns of such sums; some processors sum up the rest in another order
_HALF_PRECISION_ROWS = 4  # 16-bit types need a multiple of four rows on every processor
_HALF_PRECISION_CHUNK = 256  # longest inner product of 16-bit types on processors that divide longer ones by the rows
_TILE_INPUTS = 32  # 16-bit inputs that one instruction of such a processor takes
_MIN_CHUNK = 32  # torch multiplies very small matrices without the BLAS,
_MAX_SMALL_WEIGHT = 2**12 // _HALF_PRECISION_ROWS  # and 16-bit ones whose sizes multiply to 2**12 without oneDNN
_PROBE_ROW_COUNTS = (1, 2, 3, 5, 6, 7, 9, 11, 13, 19, 25, 33, 65)
_PROBE_MAX_ROWS = 128  # rows of the product that smaller ones are compared with


class RowInvariance(NamedTuple):
    """What products must look like on this processor for the bits of a row to be independent of the other rows."""

    min_rows: int
    row_multiple: int
    sum_block: int  # terms of a sum that may have up to MAX_NODES zeros between them
    max_rows: int = 0  # rows of a product, the others are computed after them; 0 for any number
    column_multiple: int = 1  # such sums have a multiple of so many columns


def min_rows() -> int:
    """The smallest number of rows of a float32 product that rounds as one of many rows does."""
    return _probe(torch.get_num_threads()).min_rows


def row_multiple() -> int:
    """The number that the rows of a float32 product must be a multiple of."""
    return _probe(torch.get_num_threads()).row_multiple


def max_rows() -> int:
    """The most rows of a float32 product, 0 if there is no limit."""
    return _probe(torch.get_num_threads()).max_rows


def column_multiple() -> int:
    """The number that the columns of sums with zeros between the terms must be a multiple of."""
    return _probe(torch.get_num_threads()).column_multiple


def sum_block(kv_heads: int) -> int:
    """How many positions attention may sum up at a time without zeros between them changing the bits.

    The sums of several KV heads are distributed over threads; that of a single one may be shared by them.
    """
    return _probe(torch.get_num_threads()).sum_block if kv_heads > 1 else _SUM_BLOCKS[-1]


def max_inner_size() -> int:
    """The longest inner product that the BLAS does in one go for any number of rows; many threads share longer ones."""
    return 768 if torch.get_num_threads() <= 2 else 256


def inner_chunks(inputs: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Start and width of the parts of an inner product that are summed up one after the other."""
    chunk, end = max_inner_size(), inputs
    while 0 < inputs % chunk < min(_MIN_CHUNK, inputs):
        chunk -= _MIN_CHUNK
    if dtype != torch.float32 and divides_half_precision(torch.get_num_threads()):
        chunk, end = _HALF_PRECISION_CHUNK, inputs // _TILE_INPUTS * _TILE_INPUTS  # the rest is a part of its own
    parts = [(start, min(chunk, end - start)) for start in range(0, end, chunk)]
    return parts if end == inputs else [*parts, (end, inputs - end)]


def padded_rows(count: int, dtype: torch.dtype) -> int:
    """The number of rows that a product of `count` rows is padded to."""
    least = multiple = _HALF_PRECISION_ROWS
    if dtype == torch.float32:
        least, multiple = min_rows(), row_multiple()
    return _round_up(max(count, least), multiple)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def linear(x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Row-invariant `F.linear`: x (..., in) and weight (out, in), or packed (P, in, PACK_WIDTH), to (..., out).

    A quantised weight is dequantised for this product: on a CPU it saves memory and not time.
    """
    if isinstance(weight, QuantizedWeight):
        weight = _dequantize(weight, x.dtype)
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    if weight.is_mkldnn:
        threads = torch.get_num_threads()  # which may have changed since the weight was packed
        if not torch.is_grad_enabled() and onednn.is_row_invariant(*weight.shape, weight.dtype, threads):
            out = onednn.product(x, weight)
            return out if bias is None else out.add_(bias)
        weight = onednn.unpack(weight)
    if torch.is_grad_enabled():
        return F.linear(x, unpack(weight), bias)
    inputs = x.shape[-1]
    count = x.numel() // inputs
    padding = padded_rows(count, x.dtype) - count
    rows = F.pad(x.reshape(-1, inputs), (0, 0, 0, padding)) if padding else x
    chunks = inner_chunks(inputs, x.dtype)
    if len(chunks) == 1:
        out = _product(rows, weight)
    else:
        parts = (_product(rows.narrow(-1, *chunk), weight.narrow(1, *chunk)) for chunk in chunks)
        out = functools.reduce(Tensor.add_, parts)
    if bias is not None:
        out += bias
    return out[:count].view(*x.shape[:-1], -1) if padding else out


def _dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight packed in float32, or input-major (out, in) in another dtype."""
    matrix = weight.dequantize().to(dtype)
    if dtype == torch.float32 and matrix.ndim == 3:
        return matrix
    return unpack(matrix).t().contiguous().t()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., in), of a number of rows that `padded_rows` allows, times a weight that may be packed: (..., out)."""
    product, most = F.linear if weight.ndim == 2 else _packed_product, max_rows()
    if x.dtype != torch.float32:
        is_small = weight.numel() <= _MAX_SMALL_WEIGHT
        return linear(x.float(), weight.float()).to(x.dtype) if is_small else product(x, weight)
    if not most:
        return product(x, weight)
    parts = [product(part, weight) for part in x.reshape(-1, x.shape[-1]).split(most)]
    return torch.cat(parts).view(*x.shape[:-1], -1)


def batched_product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (B, M, K) times y (B, K, N), plus a bias (B, M, N), where `padded_rows` allows M rows: (B, M, N)."""
    count, most = x.shape[1], max_rows()
    if not most or count == most:
        return torch.bmm(x, y) if bias is None else torch.baddbmm(bias, x, y)
    starts = range(0, count, most)
    if bias is None:
        return torch.cat([torch.bmm(x.narrow(1, start, most), y) for start in starts], dim=1)
    parts = [torch.baddbmm(bias.narrow(1, start, most), x.narrow(1, start, most), y) for start in starts]
    return torch.cat(parts, dim=1)


def _packed_product(x: Tensor, packed: Tensor) -> Tensor:
    """x (..., in) times packed (P, in, PACK_WIDTH): (..., P * PACK_WIDTH)."""
    rows = x.reshape(1, -1, x.shape[-1]).expand(len(packed), -1, -1)
    return torch.bmm(rows, packed).transpose(0, 1).reshape(*x.shape[:-1], -1)


def unpack(weight: Tensor) -> Tensor:
    """The matrix (out, in) of a weight that may be packed."""
    if weight.is_mkldnn:
        return onednn.unpack(weight)
    return weight if weight.ndim == 2 else weight.transpose(1, 2).flatten(0, 1)


def prefers_onednn(dtype: torch.dtype) -> bool:
    """Whether large matrices are packed for oneDNN: always but in float32 where MKL has kernels for few rows."""
    return dtype != torch.float32 or min_rows() > _ROW_RULES[0][0]


@functools.cache
@torch.no_grad()
def _probe(threads: int) -> RowInvariance:
    """The least restrictive rules that keep rows independent on this processor, the strictest if none is seen to."""
    for least, multiple, most in _ROW_RULES:
        if not (_positions_agree(most) if most else _rows_agree(least, multiple)):
            continue
        for columns, size in itertools.product(_COLUMN_MULTIPLES, _SUM_BLOCKS):
            if _sums_agree(size, columns, least, most or _PROBE_MAX_ROWS):
                return RowInvariance(least, multiple, size, most, columns)
    log.info(
        "products on this processor round by their number of rows; images drawn with trees may differ from plain "
        "decoding where two tokens are nearly equal"
    )
    least, multiple, most = _ROW_RULES[-1]
    return RowInvariance(least, multiple, _SUM_BLOCKS[-1], most, _COLUMN_MULTIPLES[-1])


@functools.cache
@torch.no_grad()
def divides_half_precision(threads: int) -> bool:
    """Whether this processor divides long inner products of bfloat16 by the number of rows, as AMX units do."""
    for inputs, outputs in ((512, 1536), (768, 512)):
        x, matrix = _random(7, _PROBE_MAX_ROWS, inputs).bfloat16(), _random(8, inputs, outputs).bfloat16()
        expected = F.linear(x, matrix.t())
        for count in range(_HALF_PRECISION_ROWS, _PROBE_MAX_ROWS, _HALF_PRECISION_ROWS):
            if not torch.equal(F.linear(x[:count], matrix.t()), expected[:count]):
                return True
    return False


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def _rows_agree(least: int, multiple: int) -> bool:
    """True if padded products have the bits of a larger one, for matrices and for a batch of packs."""
    return all(_products_agree(least, multiple, *shape) for shape in ((64, 96), (max_inner_size(), 512)))


def _products_agree(least: int, multiple: int, inputs: int, outputs: int) -> bool:
    """`_rows_agree` for one shape of matrices: a BLAS has several kernels."""
    x, matrix = _random(0, _PROBE_MAX_ROWS, inputs), _random(1, inputs, outputs)
    packs = _random(2, 3, inputs, PACK_WIDTH)

    def products(rows: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(rows, matrix.t()), torch.bmm(rows.expand(3, -1, -1), packs)

    expected, expected_packed = products(x)
    for count in _PROBE_ROW_COUNTS:
        size = _round_up(max(count, least), multiple)
        for start in (0, _PROBE_MAX_ROWS - size):
            part = slice(start, start + size)
            out, out_packed = products(x[part])
            if not torch.equal(out, expected[part]) or not torch.equal(out_packed, expected_packed[:, part]):
                return False
    return True


def _positions_agree(count: int) -> bool:
    """True if the bits of a row of a product of so many rows do not depend on its position."""
    x, matrix = _random(0, count, 64), _random(1, 64, 96)
    expected = F.linear(x, matrix.t())
    return all(torch.equal(F.linear(x.roll(k, 0), matrix.t()), expected.roll(k, 0)) for k in range(1, count))


def _sums_agree(size: int, multiple: int, least: int, most: int) -> bool:
    """True if sums of `size` terms keep their bits when MAX_NODES zeros come between them, and more rows are added."""
    length, columns = size + MAX_NODES, _round_up(65, multiple)
    weights, values = _random(3, 2, most, size), _random(4, 2, size, columns)
    index = torch.randperm(length, generator=torch.Generator().manual_seed(5), device="cpu")[:size].sort().values
    sparse_weights, sparse_values = weights.new_zeros(2, most, length), _random(6, 2, length, columns)
    sparse_weights[:, :, index], sparse_values[:, index] = weights, values
    expected = torch.bmm(weights[:, :least], values)
    sums = (torch.bmm(sparse_weights[:, :rows], sparse_values)[:, :least] for rows in (least, most))
    return all(torch.equal(part, expected) for part in sums)
