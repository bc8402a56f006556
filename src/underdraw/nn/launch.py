"""Where kernels of our own run, and how they are launched."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch


@functools.cache
def triton_runs(device: torch.device) -> bool:
    """True where kernels of our own run: triton is there, and the GPU has the matrix units that they are made for."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that is launched while the one before it ends, on a GPU that can do that.

    Such a kernel waits first of all for what was launched before it, and says when its own long work is done.
    """
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if not can or not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
