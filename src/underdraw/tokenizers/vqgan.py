"""VQGAN image tokenizers: pixels -> codes of a learned codebook -> pixels.

One network serves the tokenizers of Chameleon (Anole, Lumina), LlamaGen (VQ-16 and VQ-8), Janus and MoVQGAN
(Lumina-mGPT 2.0). They differ in where they have attention, in whether codes are compared and looked up at length 1,
and in the norms of the decoder, which MoVQ scales and shifts by the quantised cells. Modules are named as in the
original VQGAN; models/vqgan_checkpoint.py knows what each checkpoint calls them. Pixels are RGB in [-1, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.errors import CheckpointError
from underdraw.tokenizers.blocks import (
    Codebook,
    CodebookTokenizer,
    FromWidth,
    MiddleBlock,
    check_vq_sizes,
    group_norm,
    resolution_levels,
    run_decoder_levels,
    run_encoder_levels,
    swish,
)


@dataclass(frozen=True, slots=True)
class VQArch:
    """The architecture of a VQGAN."""

    widths: tuple[int, ...]  # from the image's resolution to the lowest
    blocks: int = 2  # residual blocks of an encoder level; a decoder level has one more
    latent: int = 256
    codes: int = 8192
    code_dim: int = 256
    attention: tuple[int, ...] = ()  # indices of the levels with attention after every block; the middle always has it
    unit_codes: bool = False  # codes and cells are compared, and codes looked up, at length 1
    spatial_norm: bool = False  # the decoder's norms read the quantised cells (MoVQ)
    frames: int = 1  # of a clip that one code covers, a power of 2
    groups: int = 32

    def __post_init__(self) -> None:
        check_vq_sizes(self.widths, self.blocks, latent=self.latent, codes=self.codes, code_dim=self.code_dim)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.widths) - 1)

    @property
    def encoder_norm(self) -> FromWidth:
        return group_norm(self.groups)

    @property
    def decoder_norm(self) -> FromWidth:
        if not self.spatial_norm:
            return group_norm(self.groups)
        return lambda width: SpatialNorm(width, self.code_dim, self.groups)

    @classmethod
    def from_shapes(cls, shape: Callable[[str], torch.Size | None], *, unit_codes: bool, spatial_norm: bool) -> VQArch:
        """The architecture of a checkpoint; `shape` returns a tensor's shape by our name, None if it is missing."""

        def required(name: str) -> torch.Size:
            size = shape(name)
            if size is None:
                raise CheckpointError(f"the image tokenizer has no {name}; its file is incomplete.")
            return size

        def count(name: str) -> int:
            return next(index for index in itertools.count() if shape(name.format(index)) is None)

        levels = count("encoder.down.{}.block.0.conv1.weight")
        codes, code_dim = required("quantize.embedding.weight")
        return cls(
            widths=tuple(required(f"encoder.down.{level}.block.0.conv1.weight")[0] for level in range(levels)),
            blocks=count("encoder.down.0.block.{}.conv1.weight"),
            latent=required("post_quant_conv.weight")[0],
            codes=codes,
            code_dim=code_dim,
            attention=tuple(i for i in range(levels) if shape(f"encoder.down.{i}.attn.0.q.weight") is not None),
            unit_codes=unit_codes,
            spatial_norm=spatial_norm,
        )


class SpatialNorm(nn.Module):
    """GroupNorm, scaled and shifted by 1x1 convolutions of the quantised cells."""

    def __init__(self, width: int, code_dim: int, groups: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(groups, width, eps=1e-6)
        self.conv_y = nn.Conv2d(code_dim, width, 1)
        self.conv_b = nn.Conv2d(code_dim, width, 1)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        cells = F.interpolate(cells, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(cells) + self.conv_b(cells)


class VQEncoder(nn.Module):
    """Pixels (B, 3, H, W) to latents (B, C, H/f, W/f)."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        norm, lowest = arch.encoder_norm, arch.widths[-1]
        self.conv_in = nn.Conv2d(3, arch.widths[0], 3, padding=1)
        self.down = resolution_levels(arch.widths, arch.blocks, norm, arch.attention, up=False)
        self.mid = MiddleBlock(lowest, norm)
        self.norm_out = norm(lowest)
        self.conv_out = nn.Conv2d(lowest, arch.latent, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = run_encoder_levels(self.down, self.conv_in(pixels))
        return self.conv_out(swish(self.norm_out(self.mid(x))))


class VQDecoder(nn.Module):
    """Latents (B, C, H, W), and the quantised cells if its norms read them, to pixels (B, 3, H*f, W*f)."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        norm, lowest = arch.decoder_norm, arch.widths[-1]
        self.conv_in = nn.Conv2d(arch.latent, lowest, 3, padding=1)
        self.mid = MiddleBlock(lowest, norm)
        self.up = resolution_levels(arch.widths, arch.blocks + 1, norm, arch.attention, up=True)
        self.norm_out = norm(arch.widths[0])
        self.conv_out = nn.Conv2d(arch.widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor, *cells: Tensor) -> Tensor:
        x = run_decoder_levels(self.up, self.mid(self.conv_in(latents), *cells), *cells)
        return self.conv_out(swish(self.norm_out(x, *cells)))


class VQGAN(CodebookTokenizer):
    """The image tokenizer of Chameleon, LlamaGen and Janus, and with spatial norms MoVQGAN."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__(arch.downsample)
        self.arch = arch
        self.encoder = VQEncoder(arch)
        self.quantize = Codebook(arch.codes, arch.code_dim, unit=arch.unit_codes)
        self.quant_conv: nn.Module = nn.Conv2d(arch.latent, arch.code_dim, 1)
        self.post_quant_conv: nn.Module = nn.Conv2d(arch.code_dim, arch.latent, 1)
        self.decoder = VQDecoder(arch)

    def to_cells(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))

    def to_pixels(self, cells: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(cells), *((cells,) if self.arch.spatial_norm else ()))
