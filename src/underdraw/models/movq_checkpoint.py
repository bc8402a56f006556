"""MoVQ image tokenizers in their authors' layout: tensor names of their files for the networks in tokenizers/movq.py.

BAAI's (Emu3) and ai-forever's (MoVQGAN) files name the same modules alike; ours are named as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import Placement
from underdraw.models.weight_map import WeightDestination, allocate, copy_weights, module_destinations
from underdraw.tokenizers.movq import ImageVQ, MoVQArch
from underdraw.tokenizers.vqgan import VQArch

# From our tensor names to the authors'.
AUTHORS_NAMES = (
    (r"\.down_block\.", "."),
    (r"\.up_block\.", "."),
    (r"\.middle_block\.attn_norm\.", ".mid.attn_1.norm."),
    (r"\.middle_block\.", ".mid."),
    (r"\.attn_norms\.(\d+)\.", r".attn.\1.norm."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.out_proj\.", ".proj_out."),
)
_IGNORED = ("loss", r"quantize\.(?!embedding)", "model_ema")  # of training


def authors_name(name: str) -> str:
    """The authors' name of one of our tensors."""
    for pattern, new in AUTHORS_NAMES:
        name = re.sub(pattern, new, name)
    return name


def movq_destinations(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, WeightDestination]:
    """The destination of each tensor of an authors' file, but for the batch counters of BatchNorm, which are scalars.

    Attention is linear layers here and 1x1 convolutions there.
    """
    destinations = {}
    for name, destination in module_destinations(model, rename=authors_name).items():
        memory = destination.memory
        if memory.ndim:
            is_convolution = memory.ndim == 2 and len(shapes.get(name, ())) == 4
            destinations[name] = WeightDestination(memory[:, :, None, None] if is_convolution else memory)
    return destinations


def load_movqgan(path: Path, placement: Placement) -> ImageVQ:
    """Load ai-forever's MoVQGAN, in float32; its architecture follows from the tensors' shapes."""
    checkpoint = Checkpoint(path, str(path))
    shapes = checkpoint.shapes()
    base = VQArch.from_shapes(shapes.get, unit_codes=False)
    arch = MoVQArch(base.widths, base.blocks, base.latent, base.codes, base.code_dim, base.attention_levels, frames=1)
    model = allocate(lambda: ImageVQ(arch), Placement(placement.device, torch.float32))
    copy_weights(checkpoint, movq_destinations(model, shapes), _IGNORED)
    return model
