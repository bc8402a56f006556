"""Published VQGAN image tokenizers: what their files call the parts of the one network in nn/vqgan.

The sizes are read off the tensors, so no configuration file is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import Placement
from underdraw.models.weight_map import WeightDestination, allocate, copy_weights, module_destinations
from underdraw.tokenizers.vqgan import VQGAN, VQArch

_CODEBOOK = "quantize.embedding.weight"


@dataclass(frozen=True, slots=True)
class Naming:
    """A file format: patterns from our names to its own, and whether its codes live on the unit sphere."""

    patterns: tuple[tuple[str, str], ...] = ()
    unit_codes: bool = False

    def published(self, name: str, levels: int = 0) -> str:
        """Our name of a tensor as the file has it; with `levels`, its decoder's levels stand in running order."""
        if levels:
            name = re.sub(r"^decoder\.up\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}", name)
        for pattern, new in self.patterns:
            name = re.sub(pattern, new, name)
        return name


CHAMELEON = Naming()
JANUS = Naming(unit_codes=True)
LLAMAGEN = Naming(
    patterns=(
        (r"coder\.(?:down|up)\.(\d+)\.block\.", r"coder.conv_blocks.\1.res."),
        (r"coder\.(?:down|up)\.", "coder.conv_blocks."),
        (r"\.mid\.block_1\.", ".mid.0."),
        (r"\.mid\.attn_1\.", ".mid.1."),
        (r"\.mid\.block_2\.", ".mid.2."),
    ),
    unit_codes=True,
)


def vqgan_destinations(
    shapes: Mapping[str, torch.Size], naming: Naming, placement: Placement, prefix: str = ""
) -> tuple[VQGAN, dict[str, WeightDestination]]:
    """An empty tokenizer in float32 for the tensors of a file, and where they go."""
    arch = VQArch.of(lambda name: shapes.get(prefix + naming.published(name)), unit_codes=naming.unit_codes)
    model = allocate(lambda: VQGAN(arch), Placement(placement.device, torch.float32))
    # Every level but the last to run is followed by an upsampling: that tells in which order a file counts them.
    running = prefix + naming.published("decoder.up.0.upsample.conv.weight") in shapes
    levels = len(arch.widths) if running else 0
    return model, module_destinations(model, prefix, lambda name: naming.published(name, levels))


def load_vqgan(path: Path, naming: Naming, placement: Placement, ignored: Sequence[str] = ()) -> VQGAN:
    """The tokenizer in a file or folder of its own, whatever prefix its names have there."""
    checkpoint = Checkpoint(path, str(path))
    shapes = checkpoint.shapes()
    prefix = next((name.removesuffix(_CODEBOOK) for name in shapes if name.endswith(_CODEBOOK)), "")
    model, slots = vqgan_destinations(shapes, naming, placement, prefix)
    copy_weights(checkpoint, slots, ignored)
    return model
