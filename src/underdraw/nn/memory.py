"""GPU memory that a batch needs besides the weights, checked before it is allocated.

The KV cache is exact; temporary tensors of a pass and the memory pool of CUDA graphs are upper estimates.
"""

from __future__ import annotations

import os

import torch

from underdraw.errors import CapacityError
from underdraw.nn.transformer import Arch
from underdraw.plan import MAX_NODES
from underdraw.sampling import MAX_TABLE_BYTES

_GRAPH_POOL = 2**28  # bytes of CUDA graphs and library workspaces
_LOGITS_COPIES = 6  # float32 copies of the logits in guidance, filters and noise
GIB = 2**30


def required_bytes(arch: Arch, rows: int, capacity: int, prompt: int, element_size: int) -> int:
    """Bytes for `rows` sequences of `capacity` slots: KV cache, the largest pass, noise and CUDA graphs.

    `prompt` is the number of tokens of the prefill.
    """
    cache = 2 * arch.layers * rows * arch.num_kv_heads * capacity * arch.head_width * element_size
    nodes = rows * max(MAX_NODES, prompt)
    layer = nodes * (3 * arch.ffn + 6 * arch.dim) * element_size + nodes * arch.heads * capacity * 4
    outputs = len(arch.outputs) if arch.outputs is not None else arch.vocab
    noise = min(rows * capacity * outputs * 4, MAX_TABLE_BYTES)
    return cache + layer + rows * MAX_NODES * outputs * 4 * _LOGITS_COPIES + noise + _GRAPH_POOL


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a GPU, torch's cached blocks included; None on other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def check_fits(arch: Arch, batch: int, copies: int, capacity: int, prompt: int, weight: torch.Tensor) -> None:
    """Raise a CapacityError for a batch that cannot fit, with the missing bytes and the batch size that would fit."""
    free = free_bytes(weight.device)
    if free is None:
        return

    def required(count: int) -> int:
        return required_bytes(arch, count * copies, capacity, prompt, weight.element_size())

    if required(batch) <= free:
        return
    fitting = next((count for count in range(batch - 1, 0, -1) if required(count) <= free), 0)
    advice = f"draw {fitting} at once" if fitting else "free memory or use a smaller model"
    raise CapacityError(
        f"{batch} images at once need {required(batch) / GIB:.2f} GiB besides the weights and {free / GIB:.2f} GiB "
        f"are free on {weight.device}; {(required(batch) - free) / GIB:.2f} GiB are missing: {advice}."
    )
