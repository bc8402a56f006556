"""Matrix products whose rows do not depend on how many rows there are.

On a CPU that holds with weights stored input-major, short inner products and enough rows, as `nn.rounding` finds out;
otherwise kernels are picked by the number of rows and round differently. The same layout is also the faster one for
small trees. Faster still, with the same bits, are panels: some outputs each, input-major, one behind the other, so that
memory is read in order. GPUs round by shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.nn.rounding import chunk, padded_rows

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


class PanelLinear(Linear):
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
            arrange(self)


def arrange(module: nn.Module) -> None:
    """Store matrices as their device multiplies best: output-major on a GPU, input-major or in panels on a CPU."""
    for layer in module.modules():
        if not isinstance(layer, Linear):
            continue
        weight = flat(layer.weight.data)
        outputs, inputs = weight.shape
        if not weight.is_cpu:
            layer.weight.data = weight.contiguous()
        elif isinstance(layer, PanelLinear) and weight.dtype == torch.float32 and outputs % PANEL == 0:
            layer.weight.data = weight.reshape(-1, PANEL, inputs).transpose(1, 2).contiguous()
        else:
            layer.weight.data = weight.t().contiguous().t()


def input_major(module: nn.Module) -> None:
    """Store every matrix of the module's Linear layers input-major, in place: same values, other strides."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.weight.data = flat(layer.weight.data).t().contiguous().t()
