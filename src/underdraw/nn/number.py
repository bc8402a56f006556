"""Numbers as tensors: a CPU takes longer to add or multiply with a number of Python's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def number(value: float) -> Tensor:
    """A number in the CPU's memory, without dimensions, so that it changes nobody's type."""
    with torch.inference_mode(False):
        return torch.tensor(value, device="cpu")


@functools.cache  # never forgotten, since captured passes read it
def order(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)
