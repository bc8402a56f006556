"""The tiny family's image tokenizer: pixels -> a grid of integer codes -> pixels.

Convolutional encoder and decoder around finite scalar quantisation (FSQ, arXiv 2309.15505): every cell is a short
vector whose entries are rounded to a few levels each, and its code is that vector read as a mixed-radix number. There
is no learned codebook, hence no codebook collapse.
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

from underdraw.errors import CheckpointError, ConfigError, check_counts
from underdraw.nn.weights import load_weights, save_weights
from underdraw.tokenizers.blocks import MAX_LEVELS, MAX_SIZE, FromWidth, ResidualBlock, Upsample, check_image_size

KIND = "underdraw-tokenizer"
Norm = Literal["cell", "group"]
Padding = Literal["zeros", "replicate"]


@dataclass(frozen=True, slots=True)
class FSQArch:
    """The architecture of an FSQ tokenizer. Widths and blocks are listed in the order in which the levels run.

    `encoder_norm="cell"` normalises every position by itself, so that the codes of an object do not depend on the rest
    of the image, as they do with the statistics of "group", the usual GroupNorm. With `encoder_padding="replicate"` a
    plain colour has one code up to the image's edge.
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
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        depths = {
            len(sizes) for sizes in (self.encoder_widths, self.encoder_blocks, self.decoder_widths, self.decoder_blocks)
        }
        if len(depths) != 1:
            raise ConfigError(
                f"encoder and decoder need as many widths as blocks, all four the same number; given {sorted(depths)}."
            )
        blocks = max((*self.encoder_blocks, *self.decoder_blocks), default=0)
        sizes = {f"width {i}": width for i, width in enumerate((*self.encoder_widths, *self.decoder_widths))}
        check_counts("an image tokenizer", MAX_SIZE, **sizes, codes=self.codes)
        check_counts("an image tokenizer", MAX_LEVELS, levels=len(self.encoder_widths), blocks=max(blocks, 1))
        if not self.levels or min(self.levels) < 2:
            raise ConfigError(f"every FSQ dimension needs at least 2 levels; given {self.levels}.")

    @property
    def codes(self) -> int:
        """Number of different codes."""
        return math.prod(self.levels)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.encoder_widths) - 1)


class Quantized(NamedTuple):
    """Cells rounded to their levels, with straight-through gradients, and their codes."""

    cells: Tensor  # (B, D, H, W)
    codes: Tensor  # (B, H, W) int64
    latents: Tensor  # (B, H, W, D) before rounding, in levels


class Reconstruction(NamedTuple):
    """An image after encoding and decoding."""

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
        """Cells of codes."""  # (B, H, W) -> (B, D, H, W)
        return self.codebook[codes].movedim(-1, 1)


class ChannelRMSNorm(nn.Module):
    """RMS norm over the channels of every position, independent of all other positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        cells = x.movedim(1, -1)  # (B, H, W, C), contiguous if x is channels_last
        scale = torch.rsqrt(cells.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return (cells * scale * self.weight.to(x.dtype) + self.bias.to(x.dtype)).movedim(-1, 1)


def _group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(16, width)


def _identity_block(width: int, norm: FromWidth, padding: Padding = "zeros") -> ResidualBlock:
    """A residual block that is the identity until it is trained."""
    block = ResidualBlock(width, width, norm, padding_mode=padding, activation=F.silu)
    nn.init.zeros_(block.conv2.weight)
    if block.conv2.bias is not None:
        nn.init.zeros_(block.conv2.bias)
    return block


class FSQEncoder(nn.Sequential):
    """Pixels to unrounded cells."""

    def __init__(self, arch: FSQArch) -> None:
        widths, padding = arch.encoder_widths, arch.encoder_padding
        norm: FromWidth = ChannelRMSNorm if arch.encoder_norm == "cell" else _group_norm
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, padding_mode=padding)]
        for stage, (width, blocks) in enumerate(zip(widths, arch.encoder_blocks, strict=True)):
            if stage:
                layers += [nn.SiLU()] if arch.encoder_blocks[stage - 1] == 0 else []
                layers.append(nn.Conv2d(widths[stage - 1], width, 4, stride=2, padding=1, padding_mode=padding))
            layers += [_identity_block(width, norm, padding) for _ in range(blocks)]
        layers += [norm(widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], len(arch.levels), 1)]
        super().__init__(*layers)


class FSQDecoder(nn.Sequential):
    """Rounded cells to pixels."""

    def __init__(self, arch: FSQArch) -> None:
        widths = arch.decoder_widths
        layers: list[nn.Module] = [nn.Conv2d(len(arch.levels), widths[0], 3, padding=1)]
        for stage, (width, blocks) in enumerate(zip(widths, arch.decoder_blocks, strict=True)):
            if stage:
                layers.append(Upsample(widths[stage - 1], width))
            layers += [_identity_block(width, _group_norm) for _ in range(blocks)]
        layers += [_group_norm(widths[-1]), nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1)]
        super().__init__(*layers)


class FSQTokenizer(nn.Module):
    """An image tokenizer with finite scalar quantisation. Pixels are RGB in [-1, 1]."""

    def __init__(self, arch: FSQArch) -> None:
        super().__init__()
        self.arch = arch
        self.encoder = FSQEncoder(arch)
        self.quantizer = FiniteScalarQuantizer(arch.levels)
        self.decoder = FSQDecoder(arch)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on CPU, twice on GPU

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return self.arch.downsample

    @property
    def codebook(self) -> Tensor:
        """The cell of each code."""  # (K, D)
        return self.quantizer.codebook

    def forward(self, pixels: Tensor) -> Reconstruction:
        """Encode and decode with gradients, not clamped, for training."""
        quantized = self.quantizer(self.encoder(pixels.contiguous(memory_format=torch.channels_last)))
        return Reconstruction(self.decoder(quantized.cells), quantized.codes, quantized.latents)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Codes of images."""  # (B, 3, H, W) -> (B, H/f, W/f) int64
        check_image_size(pixels, self.downsample)
        pixels = pixels.to(self._dtype()).contiguous(memory_format=torch.channels_last)
        return self.quantizer(self.encoder(pixels)).codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Images of codes, clamped to [-1, 1]."""  # (B, H, W) -> (B, 3, H*f, W*f)
        cells = self.quantizer.lookup(codes).to(self._dtype()).contiguous(memory_format=torch.channels_last)
        return self.decoder(cells).clamp(-1, 1)

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def save_tokenizer(
    folder: str | Path, model: FSQTokenizer, progress: Mapping[str, Any], precision: Literal["bf16", "int8"] = "bf16"
) -> None:
    """Write a tokenizer's weights with its architecture and training progress."""
    about = {"kind": KIND, "arch": dataclasses.asdict(model.arch), "progress": dict(progress)}
    save_weights(folder, model.state_dict(), about, precision)


def load_tokenizer(folder: str | Path, device: torch.device | str = "cpu") -> tuple[FSQTokenizer, dict[str, Any]]:
    """Read a tokenizer in float32, and its training progress."""
    weights, about = load_weights(folder)
    if about.get("kind") != KIND:
        raise CheckpointError(
            f"{folder} holds no image tokenizer: its kind is {about.get('kind')!r}, not {KIND!r}; "
            "pass the folder of a tokenizer."
        )
    model = FSQTokenizer(FSQArch(**about["arch"]))
    model.load_state_dict(weights)
    return model.to(device), about["progress"]
