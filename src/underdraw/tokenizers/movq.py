"""Emu3's image tokenizer: a MoVQ network for clips, with convolutions over time around its encoder and decoder.

An image is a clip of four equal frames. Only the convolutions over time mix frames, so the encoder runs on one frame
and the decoder paints only the first of the four: the same numbers for a quarter of the work.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.tokenizers.blocks import swish
from underdraw.tokenizers.vqgan import VQGAN, VQArch, VQDecoder, VQEncoder


class TimeConv(nn.Module):
    """A convolution over time and space, causal in time: (B, C, T, H, W)."""

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


class TimeResidualBlock(nn.Module):
    """Two normalised convolutions over time and space, with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm3d(width), nn.BatchNorm3d(width)
        self.conv1, self.conv2 = (TimeConv(width, width, (3, 3, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(swish(self.norm2(self.conv1(swish(self.norm1(x))))))


def _time_resamples(arch: VQArch, *, up: bool) -> nn.ModuleList:
    """As many as halve or double the number of frames to or from one."""
    return nn.ModuleList(TimeResample(arch.latent, up=up) for _ in range(arch.frames.bit_length() - 1))


def _time_blocks(arch: VQArch) -> nn.ModuleList:
    return nn.ModuleList(TimeResidualBlock(arch.latent) for _ in range(arch.blocks))


class VideoEncoder(VQEncoder):
    """An image (B, 3, H, W) to latents (B, C, 1, H/f, W/f) of one clip."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__(arch)
        self.frames = arch.frames
        self.time_conv = _time_resamples(arch, up=False)
        self.time_res_stack = _time_blocks(arch)

    def forward(self, pixels: Tensor) -> Tensor:
        x = super().forward(pixels)[:, :, None].expand(-1, -1, self.frames, -1, -1)
        for conv in self.time_conv:
            x = swish(conv(x))
        for block in self.time_res_stack:
            x = block(x)
        return x


class VideoDecoder(VQDecoder):
    """Latents and quantised cells of one clip, both (B, C, 1, H, W), to its first frame (B, 3, H*f, W*f)."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__(arch)
        self.time_res_stack = _time_blocks(arch)
        self.time_conv = _time_resamples(arch, up=True)

    def forward(self, latents: Tensor, *cells: Tensor) -> Tensor:
        both = torch.cat([latents, *cells])
        for block in self.time_res_stack:
            both = block(both)
        for conv in self.time_conv:
            both = swish(conv(both))
        return super().forward(*both[:, :, 0].chunk(2))  # the first frame


class VideoVQ(VQGAN):
    """The tokenizer of clips, for single images."""

    def __init__(self, arch: VQArch) -> None:
        super().__init__(arch)
        self.encoder, self.decoder = VideoEncoder(arch), VideoDecoder(arch)
        self.quant_conv = TimeConv(arch.latent, arch.code_dim, (3, 1, 1))
        self.post_quant_conv = TimeConv(arch.code_dim, arch.latent, (3, 1, 1))

    def to_cells(self, pixels: Tensor) -> Tensor:
        return super().to_cells(pixels)[:, :, 0]

    def to_pixels(self, cells: Tensor) -> Tensor:
        return super().to_pixels(cells[:, :, None])  # a clip of one frame
