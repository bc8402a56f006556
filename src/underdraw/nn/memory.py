"""Memory planned ahead: what a batch needs on its device besides the weights, and what to do if there is not as much.

The cache is exact; what passes need for a moment, and captured ones for good, is an upper estimate.
"""

from __future__ import annotations

import torch

from underdraw.errors import CapacityError
from underdraw.nn.transformer import Arch
from underdraw.plan import MAX_NODES
from underdraw.sampling import MAX_TABLE_BYTES

_CAPTURED = 2**28  # bytes that captured passes and libraries may take for good
_LOGITS = 6  # float32 copies of the logits that guidance, filters and noise make
GIB = 2**30


def needed(arch: Arch, rows: int, capacity: int, prompt: int, size: int) -> int:
    """Bytes for `rows` sequences of `capacity` places: cache, the largest pass, noise and what is captured.

    `prompt` is how many places are read at once before the picture, `size` the bytes of one number.
    """
    cache = 2 * arch.layers * rows * arch.groups * capacity * arch.width * size
    nodes = rows * max(MAX_NODES, prompt)
    layer = nodes * (3 * arch.ffn + 6 * arch.dim) * size + nodes * arch.heads * capacity * 4
    outputs = len(arch.outputs) if arch.outputs is not None else arch.vocab
    noise = min(rows * capacity * outputs * 4, MAX_TABLE_BYTES)
    return cache + layer + rows * MAX_NODES * outputs * 4 * _LOGITS + noise + _CAPTURED


def free(device: torch.device) -> int | None:
    """Bytes that can still be taken on a GPU, what torch holds in reserve included; None where nobody counts."""
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def check(arch: Arch, batch: int, copies: int, capacity: int, prompt: int, weight: torch.Tensor) -> None:
    """Refuse a batch that cannot fit, saying how much is missing and how many pictures at once would fit."""
    there = free(weight.device)
    if there is None:
        return

    def wanted(count: int) -> int:
        return needed(arch, count * copies, capacity, prompt, weight.element_size())

    if wanted(batch) <= there:
        return
    fits = next((count for count in range(batch - 1, 0, -1) if wanted(count) <= there), 0)
    advice = f"draw {fits} at once" if fits else "free memory or use a smaller model"
    raise CapacityError(
        f"{batch} pictures at once need {wanted(batch) / GIB:.2f} GiB besides the weights and {there / GIB:.2f} GiB "
        f"are free on {weight.device}; {(wanted(batch) - there) / GIB:.2f} GiB are missing: {advice}."
    )
