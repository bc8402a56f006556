"""Numbers as tensors: a CPU takes longer to add or multiply with a number of Python's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def scalar(value: float) -> Tensor:
    """A number in the CPU's memory, without dimensions, so that it changes nobody's type."""
    with torch.inference_mode(False):
        return torch.tensor(value, device="cpu")


@functools.cache  # never forgotten, since captured passes read it
def arange_cached(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@functools.cache  # never forgotten, since captured passes read these tensors
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor that is made once, so that no step waits for a copy to the device."""
    return torch.tensor(values, dtype=dtype, device=device)
