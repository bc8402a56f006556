"""Matrix products whose rows do not depend on how many rows there are.

Plain decoding multiplies one or two rows at a time, a tree pass a hundred. The exactness promise needs both to give
the same bits. On a CPU in float32 that holds with weights stored input-major, at least two rows, and inner products
of at most `CHUNK` terms at a time; other layouts pick kernels by the number of rows and round differently. The same
layout is also the faster one for small trees. GPUs round by shape; there the engine pads instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 768  # longest inner product that the BLAS does in one go for any number of rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in), transposed: (..., out)."""
    if x.device.type != "cpu" or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1:
        return linear(rows.expand(2, -1), weight, bias)[0].view(*x.shape[:-1], -1)
    out = F.linear(rows[:, :CHUNK], weight[:, :CHUNK])
    for start in range(CHUNK, x.shape[-1], CHUNK):
        out += F.linear(rows[:, start : start + CHUNK], weight[:, start : start + CHUNK])
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def input_major(module: nn.Module) -> None:
    """Store every matrix of the module's Linear layers input-major, in place: same values, other strides."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.t().contiguous().t()
