"""Small tensors that are built once and cached.

Cached without limit: CUDA graphs keep reading the tensors that were passed to them at capture.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def scalar(value: float) -> Tensor:
    """A 0-dimensional CPU tensor. Arithmetic with it is faster than with a Python number and promotes no dtype."""
    with torch.inference_mode(False):
        return torch.tensor(value, device="cpu")


@functools.cache
def arange_cached(count: int, device: torch.device) -> Tensor:
    """0, 1, ..., count - 1."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


@functools.cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor on the device, so that no pass waits for a host-to-device copy."""
    return torch.tensor(values, dtype=dtype, device=device)
