"""Whether the bits of a row may depend on the other rows of a pass, and which kernels follow from that on a GPU.

`row-invariant` (the default): the logits of a node have the same bits in every tree, bucket and batch, so the same seed
gives the same image with and without speculation, in every dtype. A CPU has no other mode (docs/exactness.md).
`fastest`: GEMMs and attention by whatever kernel is fastest for their shape. Rounding then depends on the shape, a near
tie is decided differently now and then, and an image may differ from that of plain decoding.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from underdraw.nn.attention import AttentionBackend, triton_available
from underdraw.nn.layer_functions import EAGER, LayerFunctions

log = logging.getLogger(__name__)
Numerics = Literal["row-invariant", "fastest"]


@functools.cache  # so that the warning is given once
def resolve_numerics(numerics: Numerics, device: torch.device) -> Numerics:
    """The numerics that a device can keep: `fastest`, with a warning, where the kernels for the other are missing."""
    if device.type == "cpu" or numerics == "fastest" or triton_available(device):
        return numerics
    log.warning(
        "row-invariant numerics need triton and a GPU of compute capability 8.0 or newer, which %s lacks; images may "
        "differ from those of plain decoding (numerics='fastest').",
        device,
    )
    return "fastest"


def eager_backend(numerics: Numerics, device: torch.device) -> tuple[LayerFunctions, AttentionBackend]:
    """Layer functions and attention of passes that are not compiled."""
    if device.type == "cuda" and resolve_numerics(numerics, device) == "row-invariant":
        from underdraw.nn.row_invariant_gpu import ROW_INVARIANT

        return ROW_INVARIANT, "tree"
    return EAGER, "sdpa"
