"""Emu3's image tokenizer: a VQ network for video, used here for single pictures.

A picture is a clip of four equal frames. Only the convolutions over time ever mix frames, so the encoder sees one frame
and the decoder paints only the first of the four: the same numbers for a quarter of the work. The decoder's norms are
scaled and shifted by the codes' own cells. Modules are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.tokenizers.vqgan import Codebook, Resample, swish, whole_cells


@dataclass(frozen=True, slots=True)
class VideoVQArch:
    """Shape of a tokenizer: `widths` from the pixels inwards, one per resolution."""

    widths: tuple[int, ...] = (256, 512, 512, 1024)
    blocks: int = 2
    latent: int = 4
    codes: int = 32768
    code_dim: int = 4
    attention: tuple[int, ...] = (3,)  # levels with attention after every block
    frames: int = 4  # that one code covers, a power of 2
    groups: int = 32

    @property
    def downsample(self) -> int:
        return 2 ** (len(self.widths) - 1)


class CellNorm(nn.Module):
    """GroupNorm, scaled and shifted by 1x1 convolutions of the codes' cells."""

    def __init__(self, width: int, arch: VideoVQArch) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(arch.groups, width, eps=1e-6)
        self.conv_y = nn.Conv2d(arch.code_dim, width, 1)
        self.conv_b = nn.Conv2d(arch.code_dim, width, 1)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        cells = F.interpolate(cells, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(cells) + self.conv_b(cells)


class PlainNorm(nn.GroupNorm):
    """GroupNorm in the place of a CellNorm."""

    def forward(self, x: Tensor, _: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def _norm(width: int, arch: VideoVQArch, *, cells: bool) -> nn.Module:
    return CellNorm(width, arch) if cells else PlainNorm(arch.groups, width, eps=1e-6)


class Residual(nn.Module):
    def __init__(self, width: int, out: int, arch: VideoVQArch, *, cells: bool) -> None:
        super().__init__()
        self.norm1 = _norm(width, arch, cells=cells)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = _norm(out, arch, cells=cells)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        hidden = self.conv1(swish(self.norm1(x, cells)))
        return self.nin_shortcut(x) + self.conv2(swish(self.norm2(hidden, cells)))


class CellAttention(nn.Module):
    """One head over all cells of the picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2).transpose(1, 2)  # (B, H * W, C)
        out = F.scaled_dot_product_attention(self.q_proj(flat), self.k_proj(flat), self.v_proj(flat))
        return self.out_proj(out).transpose(1, 2).unflatten(2, x.shape[-2:])


class Level(nn.Module):
    """The blocks of one resolution, each followed by attention where the level has it."""

    def __init__(self, inputs: int, out: int, blocks: int, arch: VideoVQArch, *, cells: bool, attention: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            Residual(inputs if index == 0 else out, out, arch, cells=cells) for index in range(blocks)
        )
        count = blocks if attention else 0
        self.attn = nn.ModuleList(CellAttention(out) for _ in range(count))
        self.attn_norms = nn.ModuleList(_norm(out, arch, cells=cells) for _ in range(count))

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            x = block(x, cells)
            if self.attn:
                x = x + self.attn[index](self.attn_norms[index](x, cells))
        return x


class Middle(nn.Module):
    def __init__(self, width: int, arch: VideoVQArch, *, cells: bool) -> None:
        super().__init__()
        self.block_1 = Residual(width, width, arch, cells=cells)
        self.attn_1 = CellAttention(width)
        self.attn_norm = _norm(width, arch, cells=cells)
        self.block_2 = Residual(width, width, arch, cells=cells)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        x = self.block_1(x, cells)
        return self.block_2(x + self.attn_1(self.attn_norm(x, cells)), cells)


class TimeConv(nn.Module):
    """A convolution over time and space that looks only back in time: (B, C, T, H, W)."""

    def __init__(self, width: int, out: int, kernel: tuple[int, int, int], stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(width, out, kernel, stride=(stride, 1, 1))
        side = kernel[1] // 2
        self.padding = (side, side, side, side, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.padding))


class TimeResample(nn.Module):
    """Halves or doubles the number of frames."""

    def __init__(self, width: int, *, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = TimeConv(width, width, (3, 3, 3)) if up else TimeConv(width, width, (4, 3, 3), stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.repeat_interleave(2, dim=2) if self.up else x)


class TimeResidual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm3d(width), nn.BatchNorm3d(width)
        self.conv1, self.conv2 = (TimeConv(width, width, (3, 3, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(swish(self.norm2(self.conv1(swish(self.norm1(x))))))


def _levels(arch: VideoVQArch, blocks: int, *, up: bool) -> nn.ModuleList:
    """Levels by resolution, each with the resampling behind it; those of a decoder are walked backwards."""
    widths, last = arch.widths, len(arch.widths) - 1
    levels = nn.ModuleList()
    for index, width in enumerate(widths):
        inputs = widths[min(index + 1, last)] if up else widths[max(0, index - 1)]
        level = Level(inputs, width, blocks, arch, cells=up, attention=index in arch.attention)
        resampled = index > 0 if up else index < last
        level.add_module("upsample" if up else "downsample", Resample(width, up=up) if resampled else nn.Identity())
        levels.append(level)
    return levels


class Encoder(nn.Module):
    """A picture to cells."""

    def __init__(self, arch: VideoVQArch) -> None:
        super().__init__()
        self.frames = arch.frames
        self.conv_in = nn.Conv2d(3, arch.widths[0], 3, padding=1)
        self.down_block = nn.ModuleDict({"down": _levels(arch, arch.blocks, up=False)})
        self.middle_block = Middle(arch.widths[-1], arch, cells=False)
        self.norm_out = nn.GroupNorm(arch.groups, arch.widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(arch.widths[-1], arch.latent, 3, padding=1)
        halvings = arch.frames.bit_length() - 1
        self.time_conv = nn.ModuleList(TimeResample(arch.latent, up=False) for _ in range(halvings))
        self.time_res_stack = nn.ModuleList(TimeResidual(arch.latent) for _ in range(arch.blocks))

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, C, 1, H/f, W/f)."""
        x = self.conv_in(pixels)
        for level in _modules(self.down_block["down"]):
            x = level.downsample(level(x, x))  # type: ignore[operator]
        x = self.conv_out(swish(self.norm_out(self.middle_block(x, x))))
        x = x[:, :, None].expand(-1, -1, self.frames, -1, -1)
        for conv in self.time_conv:
            x = swish(conv(x))
        for block in self.time_res_stack:
            x = block(x)
        return x


class Decoder(nn.Module):
    """Cells to a picture."""

    def __init__(self, arch: VideoVQArch) -> None:
        super().__init__()
        self.time_res_stack = nn.ModuleList(TimeResidual(arch.latent) for _ in range(arch.blocks))
        doublings = arch.frames.bit_length() - 1
        self.time_conv = nn.ModuleList(TimeResample(arch.latent, up=True) for _ in range(doublings))
        self.conv_in = nn.Conv2d(arch.latent, arch.widths[-1], 3, padding=1)
        self.middle_block = Middle(arch.widths[-1], arch, cells=True)
        self.up_block = nn.ModuleDict({"up": _levels(arch, arch.blocks + 1, up=True)})
        self.norm_out = CellNorm(arch.widths[0], arch)
        self.conv_out = nn.Conv2d(arch.widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor, cells: Tensor) -> Tensor:
        """Both (B, C, 1, H, W) -> (B, 3, H*f, W*f)."""
        both = torch.cat([latents, cells])
        for block in self.time_res_stack:
            both = block(both)
        for conv in self.time_conv:
            both = swish(conv(both))
        x, cells = both[:, :, 0].chunk(2)  # the first frame
        x = self.middle_block(self.conv_in(x), cells)
        for level in reversed(_modules(self.up_block["up"])):
            x = level.upsample(level(x, cells))  # type: ignore[operator]
        return self.conv_out(swish(self.norm_out(x, cells)))


def _modules(levels: nn.Module) -> Sequence[nn.Module]:
    return list(levels.children())


class VideoVQ(nn.Module):
    """Emu3's tokenizer. Pixels are RGB in [-1, 1]."""

    def __init__(self, arch: VideoVQArch) -> None:
        super().__init__()
        self.arch = arch
        self.encoder = Encoder(arch)
        self.decoder = Decoder(arch)
        self.quantize = Codebook(arch.codes, arch.code_dim, unit=False)
        self.quant_conv = TimeConv(arch.latent, arch.code_dim, (3, 1, 1))
        self.post_quant_conv = TimeConv(arch.code_dim, arch.latent, (3, 1, 1))

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return self.arch.downsample

    @property
    def codebook(self) -> Tensor:
        return self.quantize.embedding.weight

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Codes of pictures: (B, 3, H, W) -> (B, H/f, W/f)."""
        whole_cells(pixels, self.downsample)
        cells = self.quant_conv(self.encoder(pixels.to(self.codebook.dtype)))
        return self.quantize.nearest(cells[:, :, 0])

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Pictures of codes, clamped to [-1, 1]: (B, H, W) -> (B, 3, H*f, W*f)."""
        cells = self.quantize.lookup(codes)[:, :, None]
        return self.decoder(self.post_quant_conv(cells), cells).clamp(-1, 1)
