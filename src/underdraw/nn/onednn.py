"""GEMMs by oneDNN with prepacked weights: row-invariant, and twice as fast as MKL's on CPUs that MKL was not tuned for.

oneDNN compiles its kernels for the processor it runs on, whoever made it. It adds up each inner product in the order
of its inputs for any number of rows from two, so rows need no padding and long products no chunks. That is probed for
every shape of a matrix before it is packed. The packed layout is oneDNN's own: such a tensor has a shape and a dtype
but no storage, and only `product` and `unpack` read it.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 128  # rows of one product, so that every number that occurs can be probed; larger ones are split
_MIN_ROWS = 2  # a single row has a kernel of its own, which adds up in another order
_MIN_WEIGHTS = 2**16  # of a matrix worth packing: a call takes 10 us, however small the product
_ROWS_HINT = 16  # the number of rows that the layout is chosen for
_DTYPES = (torch.float32, torch.bfloat16)
_PROBED_ROWS = (*range(2, 34), 40, 47, 48, 49, 56, 63, 64, 65, 80, 95, 96, 97, 112, 127)


def pack(weight: Tensor) -> Tensor | None:
    """The matrix (out, in) in oneDNN's layout; None where oneDNN is missing, or not row-invariant for its shape."""
    if weight.numel() < _MIN_WEIGHTS or weight.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return None
    if not is_row_invariant(*weight.shape, weight.dtype, torch.get_num_threads()):
        return None
    return _reorder(weight)


def unpack(packed: Tensor) -> Tensor:
    """The matrix (out, in) of a packed one, input-major."""
    return packed.to_dense().t().contiguous().t()


def product(x: Tensor, packed: Tensor) -> Tensor:
    """x (..., in) times a packed matrix (out, in): (..., out)."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < _MIN_ROWS:
        out = _multiply(F.pad(rows, (0, 0, 0, _MIN_ROWS - count)), packed)[:count]
    elif count <= MAX_ROWS:
        out = _multiply(rows, packed)
    else:
        out = torch.cat([product(part, packed) for part in rows.split(MAX_ROWS)])
    return out.view(*x.shape[:-1], -1)


def _multiply(rows: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)


@functools.cache
@torch.no_grad()
def is_row_invariant(outputs: int, inputs: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether products with matrices of this shape give a row the same bits for any number of rows and any position.

    oneDNN keeps what it compiles for this: 0.5 MB for every number of rows, 28 MB a shape.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MAX_ROWS, inputs, generator=generator, device="cpu").to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator, device="cpu").to(dtype)
    try:
        packed = _reorder(weight)
        expected = _multiply(x, packed)
    except (RuntimeError, AttributeError):  # a build of torch or a processor without these kernels
        return False
    parts = (part for count in _PROBED_ROWS for part in (slice(count), slice(MAX_ROWS - count, MAX_ROWS)))
    return all(torch.equal(_multiply(x[part], packed), expected[part]) for part in parts)
