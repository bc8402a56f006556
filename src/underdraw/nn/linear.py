"""Matrix products whose rows do not depend on how many rows there are.

Plain decoding multiplies one or two rows at a time, a tree pass a hundred. The exactness promise needs both to give
the same bits. On a CPU that holds with weights stored input-major, short inner products (see `chunk`), and at least two
rows in float32 or a multiple of four in other types; otherwise kernels are picked by the number of rows and round
differently. The same layout is also the faster one for small trees. GPUs round by shape.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def chunk() -> int:
    """The longest inner product that the BLAS does in one go for any number of rows; many threads share longer ones."""
    return 768 if torch.get_num_threads() <= 2 else 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in), transposed: (..., out)."""
    if not x.is_cpu or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    inputs, size = x.shape[-1], chunk()
    count = x.numel() // inputs
    padding = max(2 - count, 0) if x.dtype == torch.float32 else -count % 4
    rows = F.pad(x.reshape(-1, inputs), (0, 0, 0, padding)) if padding else x
    out = F.linear(rows.narrow(-1, 0, size), weight.narrow(1, 0, size)) if inputs > size else F.linear(rows, weight)
    for start in range(size, inputs, size):
        width = min(size, inputs - start)
        out += F.linear(rows.narrow(-1, start, width), weight.narrow(1, start, width))
    if bias is not None:
        out += bias
    return out[:count].view(*x.shape[:-1], -1) if padding else out


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def arrange(module: nn.Module) -> None:
    """Store matrices as their device multiplies best: input-major on a CPU, output-major elsewhere."""
    for layer in module.modules():
        if isinstance(layer, Linear) and layer.weight.device.type == "cpu":
            input_major(layer)
        elif isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.contiguous()


def input_major(module: nn.Module) -> None:
    """Store every matrix of the module's Linear layers input-major, in place: same values, other strides."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()
