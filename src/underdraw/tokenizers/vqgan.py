"""VQGAN image tokenizers: pixels -> codes of a learned codebook -> pixels.

One network serves the tokenizers of Chameleon (Anole, Lumina), LlamaGen (VQ-16 and VQ-8) and Janus; they differ in
where they have attention and in whether codes are compared and looked up at length 1. Modules are named as in the
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
from underdraw.tokenizers import blocks
from underdraw.tokenizers.blocks import BlockStyle, Codebook, CodebookTokenizer, MiddleBlock, check_vq_sizes, swish


@dataclass(frozen=True, slots=True)
class VQArch:
    """The architecture of a VQGAN."""

    widths: tuple[int, ...]  # from the image's resolution to the lowest
    blocks: int = 2  # residual blocks of an encoder level; a decoder level has one more
    latent: int = 256
    codes: int = 8192
    code_dim: int = 256
    deep_attention: bool = False  # after every block of the lowest resolution, not only in the middle
    unit_codes: bool = False  # codes and cells are compared, and codes looked up, at length 1
    groups: int = 32

    def __post_init__(self) -> None:
        check_vq_sizes(self.widths, self.blocks, latent=self.latent, codes=self.codes, code_dim=self.code_dim)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.widths) - 1)

    @property
    def attention_levels(self) -> tuple[int, ...]:
        """Indices of the levels with attention."""
        return (len(self.widths) - 1,) if self.deep_attention else ()

    @property
    def style(self) -> BlockStyle:
        return BlockStyle(blocks.group_norm(self.groups), lambda width: ConvAttention(width, self.groups))

    @classmethod
    def from_shapes(cls, shape: Callable[[str], torch.Size | None], *, unit_codes: bool) -> VQArch:
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
            deep_attention=shape(f"encoder.down.{levels - 1}.attn.0.q.weight") is not None,
            unit_codes=unit_codes,
        )


class ConvAttention(nn.Module):
    """Norm and single-head self-attention over all cells, projected by 1x1 convolutions."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))  # (B, H * W, C)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj_out(out.transpose(1, 2).unflatten(2, x.shape[-2:]))


class VQGANEncoder(nn.Module):
    """Pixels (B, 3, H, W) to latents (B, C, H/f, W/f)."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        lowest = arch.widths[-1]
        self.conv_in = nn.Conv2d(3, arch.widths[0], 3, padding=1)
        self.down = blocks.resolution_levels(arch.widths, arch.blocks, arch.style, arch.attention_levels, up=False)
        self.mid = MiddleBlock(lowest, arch.style)
        self.norm_out = arch.style.norm(lowest)
        self.conv_out = nn.Conv2d(lowest, arch.latent, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = blocks.run_encoder_levels(self.down, self.conv_in(pixels))
        return self.conv_out(swish(self.norm_out(self.mid(x))))


class VQGANDecoder(nn.Module):
    """Latents (B, C, H, W) to pixels (B, 3, H*f, W*f)."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        lowest = arch.widths[-1]
        self.conv_in = nn.Conv2d(arch.latent, lowest, 3, padding=1)
        self.mid = MiddleBlock(lowest, arch.style)
        self.up = blocks.resolution_levels(arch.widths, arch.blocks + 1, arch.style, arch.attention_levels, up=True)
        self.norm_out = arch.style.norm(arch.widths[0])
        self.conv_out = nn.Conv2d(arch.widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = blocks.run_decoder_levels(self.up, self.mid(self.conv_in(latents)))
        return self.conv_out(swish(self.norm_out(x)))


class VQGAN(CodebookTokenizer):
    """The image tokenizer of Chameleon, LlamaGen and Janus."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__(arch.downsample)
        self.arch = arch
        self.encoder = VQGANEncoder(arch)
        self.quantize = Codebook(arch.codes, arch.code_dim, unit=arch.unit_codes)
        self.quant_conv = nn.Conv2d(arch.latent, arch.code_dim, 1)
        self.post_quant_conv = nn.Conv2d(arch.code_dim, arch.latent, 1)
        self.decoder = VQGANDecoder(arch)

    def to_cells(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))

    def to_pixels(self, cells: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(cells))
