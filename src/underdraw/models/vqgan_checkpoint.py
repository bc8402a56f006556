"""Published VQGAN and MoVQ image tokenizers: tensor names of their files for the networks in tokenizers/.

The architecture of a VQGAN follows from the tensors' shapes, so no configuration file is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import Placement
from underdraw.models.weight_map import WeightDestination, allocate, copy_weights, module_destinations
from underdraw.tokenizers.vqgan import VQGAN, VQArch

_CODEBOOK = "quantize.embedding.weight"


@dataclass(frozen=True, slots=True)
class VQGANFormat:
    """A file format of VQGAN checkpoints."""

    patterns: tuple[tuple[str, str], ...] = ()  # regular expressions and replacements, from our names to the file's
    unit_codes: bool = False  # codes are compared and looked up at length 1
    spatial_norm: bool = False  # the decoder's norms read the quantised cells

    def tensor_name(self, name: str, levels: int = 0) -> str:
        """The file's name of one of our tensors; `levels` is not 0 if the file counts decoder levels as they run."""
        if levels:
            name = re.sub(r"^decoder\.up\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}", name)
        for pattern, new in self.patterns:
            name = re.sub(pattern, new, name)
        return name


CHAMELEON = VQGANFormat()
MOVQ = VQGANFormat(spatial_norm=True)  # ai-forever's (MoVQGAN) and BAAI's (Emu3) files
MOVQ_TRANSFORMERS = VQGANFormat(
    patterns=(
        (r"coder\.(down|up)\.", r"coder.\1_block.\1."),
        (r"\.mid\.attn_1\.norm\.", ".middle_block.attn_norm."),
        (r"\.mid\.", ".middle_block."),
        (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
        (r"\.([qkv])\.", r".\1_proj."),
        (r"\.proj_out\.", ".out_proj."),
    ),
    spatial_norm=True,
)
JANUS = VQGANFormat(unit_codes=True)
LLAMAGEN = VQGANFormat(
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
    model: VQGAN, shapes: Mapping[str, torch.Size], file_format: VQGANFormat, prefix: str = ""
) -> dict[str, WeightDestination]:
    """The destination of each tensor of a file, but for the batch counters of BatchNorm, which are scalars."""
    # Every decoder level but the last to run has an upsampling. If level 0 has one, the file counts them as they run.
    counts_as_run = prefix + file_format.tensor_name("decoder.up.0.upsample.conv.weight") in shapes
    levels = len(model.arch.widths) if counts_as_run else 0
    destinations = module_destinations(model, prefix, lambda name: file_format.tensor_name(name, levels))
    return {
        # The projections of attention are 1x1 convolutions here and may be linear layers there.
        name: WeightDestination(to.memory[..., 0, 0] if len(shapes.get(name, ())) == 2 < to.memory.ndim else to.memory)
        for name, to in destinations.items()
        if to.memory.ndim
    }


def allocate_vqgan(
    shapes: Mapping[str, torch.Size], file_format: VQGANFormat, placement: Placement, prefix: str = ""
) -> tuple[VQGAN, dict[str, WeightDestination]]:
    """An uninitialised float32 tokenizer for the tensors of a file, and the destination of each."""
    arch = VQArch.from_shapes(
        lambda name: shapes.get(prefix + file_format.tensor_name(name)),
        unit_codes=file_format.unit_codes,
        spatial_norm=file_format.spatial_norm,
    )
    model = allocate(lambda: VQGAN(arch), Placement(placement.device, torch.float32))
    return model, vqgan_destinations(model, shapes, file_format, prefix)


def load_vqgan(path: Path, file_format: VQGANFormat, placement: Placement, ignored: Sequence[str] = ()) -> VQGAN:
    """Load the tokenizer of a separate file or folder, whatever prefix its tensor names have."""
    checkpoint = Checkpoint(path, str(path))
    shapes = checkpoint.shapes()
    prefix = next((name.removesuffix(_CODEBOOK) for name in shapes if name.endswith(_CODEBOOK)), "")
    model, destinations = allocate_vqgan(shapes, file_format, placement, prefix)
    copy_weights(checkpoint, destinations, ignored)
    return model
