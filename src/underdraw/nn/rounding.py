"""How this machine's BLAS rounds float32 products, found out by trying.

Plain decoding multiplies one or two rows at a time, a tree pass a hundred, and the exactness promise needs both to give
the same bits. A BLAS picks its kernels by the number of rows, and kernels add up in different orders; where it changes
from one to another depends on the processor and on the number of threads (with MKL an Intel one needs two rows, an AMD
one a multiple of four). So a few small products are tried when the first one is asked for, which takes milliseconds.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from underdraw.plan import MAX_NODES

log = logging.getLogger(__name__)
_ROWS = ((2, 1), (4, 4), (8, 8), (16, 16))  # at least so many rows, and a multiple of that
_BLOCKS = (256, 64)  # places that may be summed up with the nodes of a tree between them
_COUNTS = (1, 2, 3, 5, 6, 7, 9, 11, 13, 19, 25, 33)
_MOST = 48  # rows of the product that others are compared with


class Rounding(NamedTuple):
    """What products must look like for the bits of a row not to depend on the others."""

    fewest: int  # rows at least
    multiple: int  # of which the number of rows must be one
    block: int  # terms of a sum that may have zeros between them, as many as a tree has nodes


def fewest() -> int:
    """The least number of rows of a product that rounds as one of many rows does."""
    return _tried(torch.get_num_threads()).fewest


def multiple() -> int:
    """What the number of rows must be a multiple of."""
    return _tried(torch.get_num_threads()).multiple


def block(dtype: torch.dtype, heads: int) -> int:
    """How many places attention may sum up in one go: zeros between them, where a tree has nodes, change nothing.

    The sums of several heads (of keys and values) are dealt out to the threads; those of one may be shared by them.
    """
    if dtype != torch.float32:
        return _BLOCKS[0]
    return _tried(torch.get_num_threads()).block if heads > 1 else _BLOCKS[-1]


def chunk() -> int:
    """The longest inner product that the BLAS does in one go for any number of rows; many threads share longer ones."""
    return 768 if torch.get_num_threads() <= 2 else 256


def padded_rows(count: int, dtype: torch.dtype) -> int:
    """How many rows a product of `count` rows must have; 16-bit types need a multiple of four everywhere."""
    least, of = (fewest(), multiple()) if dtype == torch.float32 else (4, 4)
    return -(-max(count, least) // of) * of


@functools.cache
@torch.no_grad()
def _tried(threads: int) -> Rounding:
    """The first of the known ways that makes rows independent here; the most cautious one if none is seen to."""
    rows = next((way for way in _ROWS if _rows_agree(*way)), None)
    size = next((size for size in _BLOCKS if rows is not None and _sums_agree(size, rows[0])), None)
    if rows is None or size is None:
        log.info("this machine rounds products by their number of rows; trees may differ from plain decoding by a bit")
    return Rounding(*(rows or _ROWS[-1]), size or _BLOCKS[-1])


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def _rows_agree(least: int, of: int) -> bool:
    """True if products of so many rows have the bits of a larger one: of a matrix, of panels, of keys."""
    x, matrix = _random(0, _MOST, 64), _random(1, 64, 96)
    heads = _random(2, 3, 64, 96)

    def products(rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.linear(rows, matrix.t()), torch.bmm(rows.expand(3, -1, -1), heads)

    flat, deep = products(x)
    for count in _COUNTS:
        size = -(-max(count, least) // of) * of
        for start in (0, _MOST - size):
            place = slice(start, start + size)
            few, few_deep = products(x[place])
            if not torch.equal(few, flat[place]) or not torch.equal(few_deep, deep[:, place]):
                return False
    return True


def _sums_agree(size: int, rows: int) -> bool:
    """True if sums of `size` terms keep their bits when zeros come between them."""
    length = size + MAX_NODES
    weights, values = _random(3, 2, rows, size), _random(4, 2, size, 65)
    place = torch.randperm(length, generator=torch.Generator().manual_seed(5), device="cpu")[:size].sort().values
    sparse, spread = weights.new_zeros(2, rows, length), _random(6, 2, length, 65)
    sparse[:, :, place], spread[:, place] = weights, values
    return torch.equal(torch.bmm(sparse, spread), torch.bmm(weights, values))
