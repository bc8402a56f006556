"""Linear layers with row-invariant products, and how their weights are stored on each device.

The products are in `row_invariant` and `onednn` on a CPU, in `row_invariant_gpu` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from underdraw.nn import onednn
from underdraw.nn.quantized_weight import QuantizedFormat, QuantizedWeight, quantize, storage_shapes
from underdraw.nn.row_invariant import PACK_WIDTH, linear, prefers_onednn, unpack


class Linear(nn.Linear):
    """nn.Linear with row-invariant products, whose weight `pack_weights` may pack on a CPU.

    State dicts, copies and other devices get it as (out, in).
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def set_weight(self, weight: Tensor) -> None:
        """Replace the values by those of a weight that may be packed."""
        if self.weight.is_mkldnn or weight.is_mkldnn:  # packed tensors cannot be the data of others
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.weight.data = weight

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if self.weight.is_mkldnn:
            weight = nn.Parameter(unpack(self.weight), requires_grad=False)
            state["_parameters"] = {**self._parameters, "weight": weight}
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        if self.weight.is_mkldnn:
            self.set_weight(unpack(self.weight))
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = unpack(destination[prefix + "weight"])

    def _load_from_state_dict(self, *arguments: Any) -> None:
        is_packed = self.weight.is_mkldnn or self.weight.ndim == 3
        self.set_weight(unpack(self.weight.data))
        super()._load_from_state_dict(*arguments)
        if is_packed:
            pack_weights(self)


class PackedLinear(Linear):
    """A large matrix without a bias, which MKL multiplies in packs of `PACK_WIDTH` outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


class QuantizedLinear(nn.Module):
    """A matrix (out, in) without a bias, as bytes and scales that are filled row by row (`nn.quantized_weight`)."""

    def __init__(self, inputs: int, outputs: int, weight_format: QuantizedFormat) -> None:
        super().__init__()
        self.inputs, self.outputs, self.format = inputs, outputs, weight_format
        values, scale = storage_shapes(outputs, inputs, weight_format)
        self.values = nn.Parameter(torch.empty(values, dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(scale, dtype=torch.float32), requires_grad=False)
        self.order: Tensor | None = None  # of the rows, if they were reordered after they were filled in
        self.sources: dict[str, slice] = {}  # rows by the names of the checkpoint's tensors that they were read from

    @property
    def weight(self) -> QuantizedWeight:
        return QuantizedWeight(self.values, self.scale, self.inputs, self.format)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def fill(self, rows: slice, weight: Tensor | QuantizedWeight) -> None:
        """Quantise `weight` into some rows, or copy rows that are quantised already."""
        if isinstance(weight, Tensor):
            weight = quantize(weight.to(self.values.device), self.format)
        self.values.data[rows].copy_(weight.values)
        self.scale.data[rows].copy_(weight.scale)

    def shape_of(self, rows: slice) -> Tensor:
        """A meta tensor with the shape of some rows of the matrix."""
        return torch.empty(self.outputs, self.inputs, device="meta")[rows]

    def rows(self, rows: slice) -> QuantizedWeight:
        """Some rows as they were filled in, with values (rows, in)."""
        weight, index = self.weight.unpack(), rows if self.order is None else self.order.argsort()[rows]
        return weight._replace(values=weight.values[index], scale=weight.scale[index])

    def reorder(self, order: Tensor) -> None:
        """Move row order[i] to row i, for all rows."""
        weight, self.order = self.weight.unpack(), order
        self.values = nn.Parameter(weight.values.data[order], requires_grad=False)
        self.scale.data = weight.scale.data[order]
        self.pack()

    def pack(self) -> None:
        """Store the bytes as their device multiplies best."""
        weight = self.weight
        if weight.values.is_cpu:
            weight = weight.unpack().pack(PACK_WIDTH if self.outputs % PACK_WIDTH == 0 else self.outputs)
        elif weight.values.is_cuda:
            weight = weight.to_words()
        self.values = nn.Parameter(weight.values.data, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        # Seen as integers, bytes and scales are moved between devices but not cast to another dtype.
        self.values = nn.Parameter(fn(self.values.data), requires_grad=False)
        self.scale = nn.Parameter(fn(self.scale.data.view(torch.int32)).view(torch.float32), requires_grad=False)
        return self


def pack_weights(module: nn.Module) -> None:
    """Store Linear layers as their device multiplies best: output-major on a GPU, input-major or packed on a CPU."""
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            layer.pack()
        elif isinstance(layer, Linear) and not layer.weight.is_mkldnn:
            layer.set_weight(_pack(unpack(layer.weight.data), in_packs=isinstance(layer, PackedLinear)))


def _pack(weight: Tensor, in_packs: bool) -> Tensor:
    """The matrix (out, in) as its device multiplies it best."""
    if not weight.is_cpu:
        return weight.contiguous()
    packed = onednn.pack(weight) if prefers_onednn(weight.dtype) else None
    if packed is not None:
        return packed
    outputs, inputs = weight.shape
    if in_packs and weight.dtype == torch.float32 and outputs % PACK_WIDTH == 0:
        return weight.reshape(-1, PACK_WIDTH, inputs).transpose(1, 2).contiguous()
    return weight.t().contiguous().t()


def to_input_major(module: nn.Module) -> None:
    """Store the Linear layers input-major, in place: same values and shapes, other strides."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.set_weight(unpack(layer.weight.data).t().contiguous().t())
