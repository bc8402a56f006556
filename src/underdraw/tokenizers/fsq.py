"""The tiny family's image tokenizer: pixels -> a grid of integer codes -> pixels.

Convolutional encoder and decoder around finite scalar quantisation (FSQ, arXiv 2309.15505): every cell is a short
vector whose entries are rounded to a few levels each, and its code is that vector read as a mixed-radix number. There
is no learned codebook, hence nothing that can collapse. This module knows nothing about token ids or text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from underdraw.errors import CheckpointError, ConfigError
from underdraw.nn.weights import load_weights, save_weights

KIND = "underdraw-tokenizer"
Norm = Literal["cell", "group"]
Padding = Literal["zeros", "replicate"]


@dataclass(frozen=True, slots=True)
class TokenizerArch:
    """Shape of a tokenizer. Widths and blocks go from the pixels inwards for the encoder, outwards for the decoder.

    `encoder_norm="cell"` normalises every position by itself, so that the codes of an object do not change with what
    stands elsewhere in the picture, as they would with group statistics; "group" is the usual GroupNorm. With
    `encoder_padding="replicate"` a plain colour has one code up to the picture's edge.
    """

    levels: tuple[int, ...] = (8, 8, 8, 8)
    encoder_widths: tuple[int, ...] = (64, 128, 192, 256)
    encoder_blocks: tuple[int, ...] = (0, 1, 1, 3)
    decoder_widths: tuple[int, ...] = (320, 256, 128, 64)
    decoder_blocks: tuple[int, ...] = (2, 2, 2, 1)
    encoder_norm: Norm = "cell"
    encoder_padding: Padding = "zeros"

    def __post_init__(self) -> None:
        for name in ("levels", "encoder_widths", "encoder_blocks", "decoder_widths", "decoder_blocks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON hands over lists
        depths = {
            len(sizes) for sizes in (self.encoder_widths, self.encoder_blocks, self.decoder_widths, self.decoder_blocks)
        }
        if len(depths) != 1:
            raise ConfigError(
                f"encoder and decoder need as many widths as blocks, all four the same number; given {sorted(depths)}"
            )
        if min(self.levels) < 2:
            raise ConfigError(f"every FSQ dimension needs at least 2 levels; given {self.levels}")

    @property
    def codes(self) -> int:
        """Number of different codes."""
        return math.prod(self.levels)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.encoder_widths) - 1)


class Quantized(NamedTuple):
    """Cells rounded to their levels, with straight-through gradients, and the codes they stand for."""

    cells: Tensor  # (B, D, H, W)
    codes: Tensor  # (B, H, W) int64
    latents: Tensor  # (B, H, W, D) before rounding, in levels


class Reconstruction(NamedTuple):
    """What a tokenizer makes of a picture."""

    pixels: Tensor  # (B, 3, H, W)
    codes: Tensor  # (B, H/f, W/f) int64
    latents: Tensor  # (B, H/f, W/f, D) before rounding, in levels


class FiniteScalarQuantizer(nn.Module):
    """Rounds each of D channels to its own number of levels, evenly spaced in [-1, 1]."""

    radius: Tensor  # (D,)
    strides: Tensor  # (D,)
    codebook: Tensor  # (K, D)

    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        counts = torch.tensor(levels)
        strides = torch.cumprod(torch.tensor([1, *levels[:-1]]), 0)
        digits = torch.arange(math.prod(levels))[:, None] // strides % counts  # (K, D)
        half = (counts - 1) / 2
        self.register_buffer("radius", half, persistent=False)
        self.register_buffer("strides", strides, persistent=False)
        self.register_buffer("codebook", digits / half - 1, persistent=False)

    def forward(self, latents: Tensor) -> Quantized:
        half = self.radius
        bounded = latents.movedim(1, -1).float().tanh() * half  # (B, H, W, D)
        digits = torch.round(bounded + half)
        codes = (digits.long() * self.strides).sum(-1)
        rounded = bounded + (digits - half - bounded).detach()
        return Quantized((rounded / half).movedim(-1, 1), codes, bounded + half)

    def lookup(self, codes: Tensor) -> Tensor:
        """Cells of given codes."""  # (B, H, W) -> (B, D, H, W)
        return self.codebook[codes].movedim(-1, 1)


class CellNorm(nn.Module):
    """Root-mean-square norm over the channels of every position, blind to all other positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        cells = x.movedim(1, -1)  # (B, H, W, C), contiguous if x is channels_last
        scale = torch.rsqrt(cells.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return (cells * scale * self.weight.to(x.dtype) + self.bias.to(x.dtype)).movedim(-1, 1)


def _norm(kind: Norm, width: int) -> nn.Module:
    return CellNorm(width) if kind == "cell" else nn.GroupNorm(16, width)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside the identity; starts as the identity."""

    def __init__(self, width: int, norm: Norm, padding: Padding = "zeros") -> None:
        super().__init__()
        self.norm1 = _norm(norm, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, padding_mode=padding)
        self.norm2 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, padding_mode=padding)
        nn.init.zeros_(self.conv2.weight)
        if self.conv2.bias is not None:
            nn.init.zeros_(self.conv2.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(hidden)))


class Upsample(nn.Module):
    """Doubles both sides, then mixes; nearest neighbour keeps flat regions flat."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Encoder(nn.Sequential):
    """Pixels to unrounded cells."""

    def __init__(self, arch: TokenizerArch) -> None:
        widths, norm, padding = arch.encoder_widths, arch.encoder_norm, arch.encoder_padding
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, padding_mode=padding)]
        for stage, (width, blocks) in enumerate(zip(widths, arch.encoder_blocks, strict=True)):
            if stage:
                layers += [nn.SiLU()] if arch.encoder_blocks[stage - 1] == 0 else []
                layers.append(nn.Conv2d(widths[stage - 1], width, 4, stride=2, padding=1, padding_mode=padding))
            layers += [ResidualBlock(width, norm, padding) for _ in range(blocks)]
        layers += [_norm(norm, widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], len(arch.levels), 1)]
        super().__init__(*layers)


class Decoder(nn.Sequential):
    """Rounded cells to pixels."""

    def __init__(self, arch: TokenizerArch) -> None:
        widths = arch.decoder_widths
        layers: list[nn.Module] = [nn.Conv2d(len(arch.levels), widths[0], 3, padding=1)]
        for stage, (width, blocks) in enumerate(zip(widths, arch.decoder_blocks, strict=True)):
            if stage:
                layers.append(Upsample(widths[stage - 1], width))
            layers += [ResidualBlock(width, "group") for _ in range(blocks)]
        layers += [nn.GroupNorm(16, widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1)]
        super().__init__(*layers)


class VQTokenizer(nn.Module):
    """Image tokenizer of the tiny family. Pixels are RGB in [-1, 1]."""

    def __init__(self, arch: TokenizerArch) -> None:
        super().__init__()
        self.arch = arch
        self.encoder = Encoder(arch)
        self.quantizer = FiniteScalarQuantizer(arch.levels)
        self.decoder = Decoder(arch)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on CPU, twice on GPU

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return self.arch.downsample

    @property
    def codebook(self) -> Tensor:
        """The cell every code stands for."""  # (K, D)
        return self.quantizer.codebook

    def forward(self, pixels: Tensor) -> Reconstruction:
        """Reconstruction with gradients, not clamped; what training wants."""
        quantized = self.quantizer(self.encoder(pixels.contiguous(memory_format=torch.channels_last)))
        return Reconstruction(self.decoder(quantized.cells), quantized.codes, quantized.latents)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Codes of pictures."""  # (B, 3, H, W) -> (B, H/f, W/f) int64
        height, width = pixels.shape[-2:]
        f = self.downsample
        if height % f or width % f:
            raise ConfigError(
                f"a picture of {height}x{width} pixels is not a multiple of {f} on both sides; "
                f"crop it to {height // f * f}x{width // f * f}"
            )
        pixels = pixels.to(self._dtype()).contiguous(memory_format=torch.channels_last)
        return self.quantizer(self.encoder(pixels)).codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Pictures of codes, clamped to [-1, 1]."""  # (B, H, W) -> (B, 3, H*f, W*f)
        cells = self.quantizer.lookup(codes).to(self._dtype()).contiguous(memory_format=torch.channels_last)
        return self.decoder(cells).clamp(-1, 1)

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def save_tokenizer(
    folder: str | Path, model: VQTokenizer, progress: Mapping[str, Any], precision: Literal["bf16", "int8"] = "bf16"
) -> None:
    """Weights with their architecture, and how long they were trained."""
    about = {"kind": KIND, "arch": dataclasses.asdict(model.arch), "progress": dict(progress)}
    save_weights(folder, model.state_dict(), about, precision)


def load_tokenizer(folder: str | Path, device: torch.device | str = "cpu") -> tuple[VQTokenizer, dict[str, Any]]:
    """A tokenizer in fp32 and how long it was trained."""
    weights, about = load_weights(folder)
    if about.get("kind") != KIND:
        raise CheckpointError(f"{folder} holds no image tokenizer (its kind is {about.get('kind')!r}, not {KIND!r}).")
    model = VQTokenizer(TokenizerArch(**about["arch"]))
    model.load_state_dict(weights)
    return model.to(device), about["progress"]
