"""Matrix products whose rows do not depend on how many rows there are.

On a CPU that holds with weights stored input-major, short inner products and enough rows, as `nn.rounding` finds out;
otherwise kernels are picked by the number of rows and round differently. The same layout is also the faster one for
small trees. Faster still, with the same bits, are panels: some outputs each, input-major, one behind the other, so that
memory is read in order. GPUs round by shape.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.plan import MAX_NODES

log = logging.getLogger(__name__)
PANEL = 32  # outputs that lie side by side; of 16, 32, 64, 128 and 256 the fastest at two rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in), transposed, or weight in panels (P, in, PANEL): (..., out)."""
    if not x.is_cpu or torch.is_grad_enabled():
        return F.linear(x, flat(weight), bias)
    product = F.linear if weight.ndim == 2 else _in_panels
    inputs, size = x.shape[-1], chunk()
    count = x.numel() // inputs
    padding = padded_rows(count, x.dtype) - count
    rows = F.pad(x.reshape(-1, inputs), (0, 0, 0, padding)) if padding else x
    out = product(rows.narrow(-1, 0, size), weight.narrow(1, 0, size)) if inputs > size else product(rows, weight)
    for start in range(size, inputs, size):
        width = min(size, inputs - start)
        out += product(rows.narrow(-1, start, width), weight.narrow(1, start, width))
    if bias is not None:
        out += bias
    return out[:count].view(*x.shape[:-1], -1) if padding else out


def _in_panels(x: Tensor, panels: Tensor) -> Tensor:
    """x (..., in) times panels (P, in, PANEL): (..., P * PANEL)."""
    rows = x.reshape(1, -1, x.shape[-1]).expand(len(panels), -1, -1)
    return torch.bmm(rows, panels).transpose(0, 1).reshape(*x.shape[:-1], -1)


def flat(weight: Tensor) -> Tensor:
    """A matrix (out, in), also if it is stored in panels."""
    return weight if weight.ndim == 2 else weight.transpose(1, 2).flatten(0, 1)


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class PackedLinear(Linear):
    """A large matrix without a bias, which a CPU may store in panels; a checkpoint holds it as it always was."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = flat(destination[prefix + "weight"])

    def _load_from_state_dict(self, *arguments: Any) -> None:
        panels = self.weight.ndim == 3
        self.weight.data = flat(self.weight.data)
        super()._load_from_state_dict(*arguments)
        if panels:
            pack_weights(self)


def pack_weights(module: nn.Module) -> None:
    """Store matrices as their device multiplies best: output-major on a GPU, input-major or in panels on a CPU."""
    for layer in module.modules():
        if not isinstance(layer, Linear):
            continue
        weight = flat(layer.weight.data)
        outputs, inputs = weight.shape
        if not weight.is_cpu:
            layer.weight.data = weight.contiguous()
        elif isinstance(layer, PackedLinear) and weight.dtype == torch.float32 and outputs % PANEL == 0:
            layer.weight.data = weight.reshape(-1, PANEL, inputs).transpose(1, 2).contiguous()
        else:
            layer.weight.data = weight.t().contiguous().t()


def input_major(module: nn.Module) -> None:
    """Store every matrix of the module's Linear layers input-major, in place: same values, other strides."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.weight.data = flat(layer.weight.data).t().contiguous().t()


_ROWS = ((2, 1), (4, 4), (8, 8), (16, 16))  # at least so many rows, and a multiple of that
_BLOCKS = (256, 64)  # places that may be summed up with the nodes of a tree between them
_COUNTS = (1, 2, 3, 5, 6, 7, 9, 11, 13, 19, 25, 33)
_MOST = 48  # rows of the product that others are compared with


class RowInvariance(NamedTuple):
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
def _tried(threads: int) -> RowInvariance:
    """The first of the known ways that makes rows independent here; the most cautious one if none is seen to."""
    rows = next((way for way in _ROWS if _rows_agree(*way)), None)
    size = next((size for size in _BLOCKS if rows is not None and _sums_agree(size, rows[0])), None)
    if rows is None or size is None:
        log.info("this machine rounds products by their number of rows; trees may differ from plain decoding by a bit")
    return RowInvariance(*(rows or _ROWS[-1]), size or _BLOCKS[-1])


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
