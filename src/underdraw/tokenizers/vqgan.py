"""VQGAN image tokenizers: pixels -> codes of a learned codebook -> pixels.

One network serves the tokenizers of Chameleon (Anole, Lumina), LlamaGen (VQ-16 and VQ-8) and Janus; they differ in
where attention stands and in whether the codebook is compared and looked up on the unit sphere. Modules are named as
in the original VQGAN; the families know what their own checkpoints call them. Pixels are RGB in [-1, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.errors import CheckpointError, ConfigError

_CELLS = 4096  # cells whose distances to all codes are held at once


@dataclass(frozen=True, slots=True)
class VQArch:
    """Shape of a tokenizer: `widths` from the pixels inwards, one per resolution."""

    widths: tuple[int, ...]
    blocks: int = 2  # residual blocks a level of the encoder; the decoder has one more
    latent: int = 256
    codes: int = 8192
    code_dim: int = 256
    deep_attention: bool = False  # after every block of the deepest level, not only in the middle
    unit_codes: bool = False  # codes and cells are compared, and codes looked up, at length 1
    groups: int = 32

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.widths) - 1)

    @classmethod
    def of(cls, shape: Callable[[str], torch.Size | None], *, unit_codes: bool) -> VQArch:
        """The architecture of tensors, given the shape of each by its name here, or None where it is not there."""

        def known(name: str) -> torch.Size:
            found = shape(name)
            if found is None:
                raise CheckpointError(f"the image tokenizer has no {name}; its file is incomplete.")
            return found

        def count(name: str) -> int:
            return next(index for index in itertools.count() if shape(name.format(index)) is None)

        levels = count("encoder.down.{}.block.0.conv1.weight")
        codes, code_dim = known("quantize.embedding.weight")
        return cls(
            widths=tuple(known(f"encoder.down.{level}.block.0.conv1.weight")[0] for level in range(levels)),
            blocks=count("encoder.down.0.block.{}.conv1.weight"),
            latent=known("post_quant_conv.weight")[0],
            codes=codes,
            code_dim=code_dim,
            deep_attention=shape(f"encoder.down.{levels - 1}.attn.0.q.weight") is not None,
            unit_codes=unit_codes,
        )


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Residual(nn.Module):
    """Two normalised 3x3 convolutions beside the identity, or beside a 1x1 convolution where the width changes."""

    def __init__(self, width: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width, eps=1e-6)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, eps=1e-6)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(swish(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(swish(self.norm2(hidden)))


class CellAttention(nn.Module):
    """One head over all cells of the picture."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        q, k, v = (part(normal).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))  # (B, H * W, C)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(out.transpose(1, 2).unflatten(2, x.shape[-2:]))


class Resample(nn.Module):
    """Halves or doubles both sides around a 3x3 convolution."""

    def __init__(self, width: int, *, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Conv2d(width, width, 3, padding=1) if up else nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        if self.up:
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # right and below only, as the published weights expect


class Level(nn.Module):
    """The blocks of one resolution, each followed by attention where the level has it."""

    def __init__(self, width: int, out: int, blocks: int, groups: int, *, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(Residual(width if index == 0 else out, out, groups) for index in range(blocks))
        self.attn = nn.ModuleList(CellAttention(out, groups) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[index](x)
        return x


class Middle(nn.Module):
    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.block_1 = Residual(width, width, groups)
        self.attn_1 = CellAttention(width, groups)
        self.block_2 = Residual(width, width, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Pixels to cells."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        widths, last = arch.widths, len(arch.widths) - 1
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList()
        for index, width in enumerate(widths):
            level = Level(
                widths[max(0, index - 1)], width, arch.blocks, arch.groups,
                attention=arch.deep_attention and index == last,
            )  # fmt: skip
            level.downsample = Resample(width, up=False) if index < last else nn.Identity()
            self.down.append(level)
        self.mid = Middle(widths[-1], arch.groups)
        self.norm_out = nn.GroupNorm(arch.groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], arch.latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level.downsample(level(x))  # type: ignore[operator]
        return self.conv_out(swish(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Cells to pixels. `up` is indexed by resolution, so it is walked backwards."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        widths, last = arch.widths, len(arch.widths) - 1
        self.conv_in = nn.Conv2d(arch.latent, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1], arch.groups)
        self.up = nn.ModuleList()
        for index, width in enumerate(widths):
            level = Level(
                widths[min(index + 1, last)], width, arch.blocks + 1, arch.groups,
                attention=arch.deep_attention and index == last,
            )  # fmt: skip
            level.upsample = Resample(width, up=True) if index > 0 else nn.Identity()
            self.up.append(level)
        self.norm_out = nn.GroupNorm(arch.groups, widths[0], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level.upsample(level(x))  # type: ignore[operator]
        return self.conv_out(swish(self.norm_out(x)))


class Codebook(nn.Module):
    """Cells to the nearest codes and back."""

    def __init__(self, codes: int, dim: int, *, unit: bool) -> None:
        super().__init__()
        self.unit = unit
        self.embedding = nn.Embedding(codes, dim)

    @property
    def entries(self) -> Tensor:
        """What the codes stand for: (K, D)."""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.unit else weight

    def nearest(self, cells: Tensor) -> Tensor:
        """(B, D, H, W) -> (B, H, W) codes, by squared distance."""
        flat = cells.movedim(1, -1).flatten(0, -2)
        flat = F.normalize(flat, dim=-1) if self.unit else flat
        entries = self.entries
        length = entries.square().sum(-1)
        parts = [(length - 2 * part @ entries.t()).argmin(-1) for part in flat.split(_CELLS)]
        return torch.cat(parts).view(cells.shape[0], *cells.shape[2:])

    def lookup(self, codes: Tensor) -> Tensor:
        """(B, H, W) -> (B, D, H, W)."""
        return self.entries[codes].movedim(-1, 1)


class VQGAN(nn.Module):
    """An image tokenizer with a learned codebook."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__()
        self.arch = arch
        self.encoder = Encoder(arch)
        self.quantize = Codebook(arch.codes, arch.code_dim, unit=arch.unit_codes)
        self.quant_conv = nn.Conv2d(arch.latent, arch.code_dim, 1)
        self.post_quant_conv = nn.Conv2d(arch.code_dim, arch.latent, 1)
        self.decoder = Decoder(arch)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return self.arch.downsample

    @property
    def codebook(self) -> Tensor:
        """The codebook as it was trained, not brought to length 1: (K, D)."""
        return self.quantize.embedding.weight

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Codes of pictures: (B, 3, H, W) -> (B, H/f, W/f)."""
        whole_cells(pixels, self.downsample)
        return self.quantize.nearest(self.quant_conv(self.encoder(pixels.to(self.codebook.dtype))))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Pictures of codes, clamped to [-1, 1]: (B, H, W) -> (B, 3, H*f, W*f)."""
        return self.decoder(self.post_quant_conv(self.quantize.lookup(codes))).clamp(-1, 1)


def whole_cells(pixels: Tensor, side: int) -> None:
    """Refuse pictures whose sides are no multiples of a code's."""
    height, width = pixels.shape[-2:]
    if height % side or width % side:
        raise ConfigError(
            f"a picture of {height}x{width} pixels is not a multiple of {side} on both sides; "
            f"crop it to {height // side * side}x{width // side * side}."
        )
