"""Building blocks that the VQ image tokenizers share, with the module names of the original VQGAN.

Blocks are built with `norm`, a function from a width to a module. They call it with a feature map and, in decoders with
spatially conditional norms (MoVQ), with the quantised cells: `norm(width)(x, *cells)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.errors import ConfigError, check_counts

MAX_SIZE, MAX_LEVELS = 2**18, 16  # far above any tokenizer; a damaged file may say anything
FromWidth = Callable[[int], nn.Module]
_LOOKUP_CELLS = 4096  # cells whose distances to all codes are in memory at once


def check_vq_sizes(widths: Sequence[int], blocks: int, **sizes: int) -> None:
    """Raise for sizes that no VQ tokenizer has."""
    named = {f"width {level}": width for level, width in enumerate(widths)}
    check_counts("an image tokenizer", MAX_SIZE, **named, **sizes)
    check_counts("an image tokenizer", MAX_LEVELS, levels=len(widths), blocks=blocks)


def group_norm(groups: int) -> FromWidth:
    """GroupNorms as VQGAN has them."""
    return lambda width: nn.GroupNorm(groups, width, eps=1e-6)


def swish(x: Tensor) -> Tensor:
    """x * sigmoid(x), in the order of the published implementations; F.silu may differ in the last bit."""
    return x * torch.sigmoid(x)


class ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions with a skip connection: a 1x1 convolution where the width changes."""

    def __init__(
        self,
        width: int,
        out: int,
        norm: FromWidth,
        *,
        padding_mode: Literal["zeros", "replicate"] = "zeros",
        activation: Callable[[Tensor], Tensor] = swish,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.norm1 = norm(width)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1, padding_mode=padding_mode)
        self.norm2 = norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, padding_mode=padding_mode)
        self.nin_shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, *cells: Tensor) -> Tensor:
        hidden = self.conv1(self.activation(self.norm1(x, *cells)))
        return self.nin_shortcut(x) + self.conv2(self.activation(self.norm2(hidden, *cells)))


class Downsample(nn.Module):
    """Halves both sides by a strided 3x3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # right and below only, as the published weights expect


class Upsample(nn.Module):
    """Doubles both sides by nearest neighbour, which keeps flat regions flat, then a 3x3 convolution."""

    def __init__(self, width: int, out: int | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out or width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class SpatialAttention(nn.Module):
    """Norm and single-head self-attention over all cells, projected by 1x1 convolutions, with a skip connection."""

    def __init__(self, width: int, norm: FromWidth) -> None:
        super().__init__()
        self.norm = norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor, *cells: Tensor) -> Tensor:
        normed = self.norm(x, *cells)
        q, k, v = (part(normed).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))  # (B, H * W, C)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(out.transpose(1, 2).unflatten(2, x.shape[-2:]))


class ResolutionLevel(nn.Module):
    """The residual blocks of one resolution, each followed by attention if the level has it."""

    def __init__(self, width: int, out: int, blocks: int, norm: FromWidth, *, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResidualBlock(width if index == 0 else out, out, norm) for index in range(blocks))
        self.attn = nn.ModuleList(SpatialAttention(out, norm) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor, *cells: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            x = block(x, *cells)
            if self.attn:
                x = self.attn[index](x, *cells)
        return x


class MiddleBlock(nn.Module):
    """Residual block, attention and residual block at the lowest resolution."""

    def __init__(self, width: int, norm: FromWidth) -> None:
        super().__init__()
        self.block_1 = ResidualBlock(width, width, norm)
        self.attn_1: nn.Module = SpatialAttention(width, norm)
        self.block_2 = ResidualBlock(width, width, norm)

    def forward(self, x: Tensor, *cells: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x, *cells), *cells), *cells)


def resolution_levels(
    widths: Sequence[int], blocks: int, norm: FromWidth, attention: Collection[int], *, up: bool
) -> nn.ModuleList:
    """The levels of an encoder, or with `up` of a decoder, both from the image's resolution to the lowest.

    Each has the `downsample` or `upsample` that follows it. `attention` has the indices of the levels with attention.
    """
    last = len(widths) - 1
    levels = nn.ModuleList()
    for index, width in enumerate(widths):
        previous = widths[min(index + 1, last)] if up else widths[max(0, index - 1)]
        level = ResolutionLevel(previous, width, blocks, norm, attention=index in attention)
        if up:
            level.upsample = Upsample(width) if index > 0 else nn.Identity()
        else:
            level.downsample = Downsample(width) if index < last else nn.Identity()
        levels.append(level)
    return levels


def run_encoder_levels(levels: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Feature maps (B, C, H, W) to those of the lowest resolution."""
    for level in levels:
        x = level.downsample(level(x))  # type: ignore[operator]
    return x


def run_decoder_levels(levels: Iterable[nn.Module], x: Tensor, *cells: Tensor) -> Tensor:
    """Feature maps of the lowest resolution to those of the image's."""
    for level in reversed(list(levels)):
        x = level.upsample(level(x, *cells))  # type: ignore[operator]
    return x


class Codebook(nn.Module):
    """A learned codebook: the nearest codes of cells, and the cells of codes. `unit`: both are compared at length 1."""

    def __init__(self, codes: int, dim: int, *, unit: bool) -> None:
        super().__init__()
        self.unit = unit
        self.embedding = nn.Embedding(codes, dim)

    @property
    def entries(self) -> Tensor:
        """The cell of each code, at length 1 if they are compared so: (K, D)."""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.unit else weight

    def nearest(self, cells: Tensor) -> Tensor:
        """Codes (B, H, W) of cells (B, D, H, W), by squared distance."""
        flat = cells.movedim(1, -1).flatten(0, -2)
        flat = F.normalize(flat, dim=-1) if self.unit else flat
        entries = self.entries
        squares = entries.square().sum(-1)
        codes = [(squares - 2 * part @ entries.t()).argmin(-1) for part in flat.split(_LOOKUP_CELLS)]
        return torch.cat(codes).view(cells.shape[0], *cells.shape[2:])

    def lookup(self, codes: Tensor) -> Tensor:
        """Cells (B, D, H, W) of codes (B, H, W)."""
        return self.entries[codes].movedim(-1, 1)


class CodebookTokenizer(nn.Module, ABC):
    """An image tokenizer with a learned codebook. Pixels are RGB in [-1, 1]."""

    quantize: Codebook

    def __init__(self, downsample: int) -> None:
        super().__init__()
        self.downsample = downsample  # pixels per code along one side

    @abstractmethod
    def to_cells(self, pixels: Tensor) -> Tensor:
        """Unquantised cells (B, D, H/f, W/f) of images (B, 3, H, W)."""

    @abstractmethod
    def to_pixels(self, cells: Tensor) -> Tensor:
        """Images (B, 3, H*f, W*f) of cells (B, D, H, W)."""

    @property
    def codebook(self) -> Tensor:
        """The codebook as it was trained, not normalised to length 1: (K, D)."""
        return self.quantize.embedding.weight

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Codes of images: (B, 3, H, W) -> (B, H/f, W/f)."""
        check_image_size(pixels, self.downsample)
        return self.quantize.nearest(self.to_cells(pixels.to(self.codebook.dtype)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Images of codes, clamped to [-1, 1]: (B, H, W) -> (B, 3, H*f, W*f)."""
        return self.to_pixels(self.quantize.lookup(codes)).clamp(-1, 1)


def check_image_size(pixels: Tensor, downsample: int) -> None:
    """Raise a ConfigError for images (..., H, W) whose sides are not multiples of a cell's."""
    height, width = pixels.shape[-2:]
    if height % downsample or width % downsample:
        raise ConfigError(
            f"an image of {height}x{width} pixels is not a multiple of {downsample} on both sides; "
            f"crop it to {height // downsample * downsample}x{width // downsample * downsample}."
        )
