"""MoVQ image tokenizers: VQ networks whose decoder's norms are scaled and shifted by the quantised cells.

`ImageVQ` is MoVQGAN (Lumina-mGPT 2.0). `VideoVQ` is the same network for clips, with convolutions over time in front of
its decoder and behind its encoder (Emu3). There an image is a clip of four equal frames. Only the convolutions over
time mix frames, so the encoder runs on one frame and the decoder paints only the first of the four: the same numbers
for a quarter of the work. Modules are named as in transformers; models/movq_checkpoint.py has the authors' names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.tokenizers import blocks
from underdraw.tokenizers.blocks import BlockStyle, Codebook, CodebookTokenizer, MiddleBlock, check_vq_sizes, swish


@dataclass(frozen=True, slots=True)
class MoVQArch:
    """The architecture of a MoVQ tokenizer."""

    widths: tuple[int, ...] = (256, 512, 512, 1024)  # from the image's resolution to the lowest
    blocks: int = 2  # residual blocks of an encoder level; a decoder level has one more
    latent: int = 4
    codes: int = 32768
    code_dim: int = 4
    attention: tuple[int, ...] = (3,)  # indices of the levels with attention after every block
    frames: int = 4  # that one code covers, a power of 2; not used for images
    groups: int = 32

    def __post_init__(self) -> None:
        check_vq_sizes(self.widths, self.blocks, latent=self.latent, codes=self.codes, code_dim=self.code_dim)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.widths) - 1)

    @property
    def time_resamples(self) -> int:
        """How often the number of frames is halved or doubled."""
        return self.frames.bit_length() - 1

    @property
    def encoder_style(self) -> BlockStyle:
        norm = blocks.group_norm(self.groups)
        return BlockStyle(norm, DenseAttention, norm)

    @property
    def decoder_style(self) -> BlockStyle:
        def norm(width: int) -> SpatialNorm:
            return SpatialNorm(width, self)

        return BlockStyle(norm, DenseAttention, norm)


class SpatialNorm(nn.Module):
    """GroupNorm, scaled and shifted by 1x1 convolutions of the quantised cells."""

    def __init__(self, width: int, arch: MoVQArch) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(arch.groups, width, eps=1e-6)
        self.conv_y = nn.Conv2d(arch.code_dim, width, 1)
        self.conv_b = nn.Conv2d(arch.code_dim, width, 1)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        cells = F.interpolate(cells, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(cells) + self.conv_b(cells)


class DenseAttention(nn.Module):
    """Single-head self-attention over all cells, projected by linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2).transpose(1, 2)  # (B, H * W, C)
        out = F.scaled_dot_product_attention(self.q_proj(flat), self.k_proj(flat), self.v_proj(flat))
        return self.out_proj(out).transpose(1, 2).unflatten(2, x.shape[-2:])


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


class MoVQEncoder(nn.Module):
    """An image (B, 3, H, W) to latents (B, C, H/f, W/f)."""

    def __init__(self, arch: MoVQArch) -> None:
        super().__init__()
        style, lowest = arch.encoder_style, arch.widths[-1]
        self.conv_in = nn.Conv2d(3, arch.widths[0], 3, padding=1)
        levels = blocks.resolution_levels(arch.widths, arch.blocks, style, arch.attention, up=False)
        self.down_block = nn.ModuleDict({"down": levels})
        self.middle_block = MiddleBlock(lowest, style)
        self.norm_out = style.norm(lowest)
        self.conv_out = nn.Conv2d(lowest, arch.latent, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        x = blocks.run_encoder_levels(self.down_block["down"].children(), self.conv_in(pixels))
        return self.conv_out(swish(self.norm_out(self.middle_block(x))))


class VideoMoVQEncoder(MoVQEncoder):
    """An image (B, 3, H, W) to latents (B, C, 1, H/f, W/f) of one clip."""

    def __init__(self, arch: MoVQArch) -> None:
        super().__init__(arch)
        self.frames = arch.frames
        self.time_conv = nn.ModuleList(TimeResample(arch.latent, up=False) for _ in range(arch.time_resamples))
        self.time_res_stack = nn.ModuleList(TimeResidualBlock(arch.latent) for _ in range(arch.blocks))

    def forward(self, pixels: Tensor) -> Tensor:
        x = super().forward(pixels)[:, :, None].expand(-1, -1, self.frames, -1, -1)
        for conv in self.time_conv:
            x = swish(conv(x))
        for block in self.time_res_stack:
            x = block(x)
        return x


class MoVQDecoder(nn.Module):
    """Latents and the quantised cells that its norms read, both (B, C, H, W), to an image (B, 3, H*f, W*f)."""

    def __init__(self, arch: MoVQArch) -> None:
        super().__init__()
        style, lowest = arch.decoder_style, arch.widths[-1]
        self.conv_in = nn.Conv2d(arch.latent, lowest, 3, padding=1)
        self.middle_block = MiddleBlock(lowest, style)
        levels = blocks.resolution_levels(arch.widths, arch.blocks + 1, style, arch.attention, up=True)
        self.up_block = nn.ModuleDict({"up": levels})
        self.norm_out = style.norm(arch.widths[0])
        self.conv_out = nn.Conv2d(arch.widths[0], 3, 3, padding=1)

    def forward(self, latents: Tensor, cells: Tensor) -> Tensor:
        x = self.middle_block(self.conv_in(latents), cells)
        x = blocks.run_decoder_levels(self.up_block["up"].children(), x, cells)
        return self.conv_out(swish(self.norm_out(x, cells)))


class VideoMoVQDecoder(MoVQDecoder):
    """Latents and quantised cells of one clip, both (B, C, 1, H, W), to its first frame (B, 3, H*f, W*f)."""

    def __init__(self, arch: MoVQArch) -> None:
        super().__init__(arch)
        self.time_res_stack = nn.ModuleList(TimeResidualBlock(arch.latent) for _ in range(arch.blocks))
        self.time_conv = nn.ModuleList(TimeResample(arch.latent, up=True) for _ in range(arch.time_resamples))

    def forward(self, latents: Tensor, cells: Tensor) -> Tensor:
        both = torch.cat([latents, cells])
        for block in self.time_res_stack:
            both = block(both)
        for conv in self.time_conv:
            both = swish(conv(both))
        return super().forward(*both[:, :, 0].chunk(2))  # the first frame


class ImageVQ(CodebookTokenizer):
    """MoVQGAN, the image tokenizer of Lumina-mGPT 2.0."""

    def __init__(self, arch: MoVQArch) -> None:
        super().__init__(arch.downsample)
        self.arch = arch
        self.encoder = MoVQEncoder(arch)
        self.decoder = MoVQDecoder(arch)
        self.quantize = Codebook(arch.codes, arch.code_dim, unit=False)
        self.quant_conv = nn.Conv2d(arch.latent, arch.code_dim, 1)
        self.post_quant_conv = nn.Conv2d(arch.code_dim, arch.latent, 1)

    def to_cells(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))

    def to_pixels(self, cells: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(cells), cells)


class VideoVQ(CodebookTokenizer):
    """Emu3's image tokenizer."""

    def __init__(self, arch: MoVQArch) -> None:
        super().__init__(arch.downsample)
        self.arch = arch
        self.encoder = VideoMoVQEncoder(arch)
        self.decoder = VideoMoVQDecoder(arch)
        self.quantize = Codebook(arch.codes, arch.code_dim, unit=False)
        self.quant_conv = TimeConv(arch.latent, arch.code_dim, (3, 1, 1))
        self.post_quant_conv = TimeConv(arch.code_dim, arch.latent, (3, 1, 1))

    def to_cells(self, pixels: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(pixels))[:, :, 0]

    def to_pixels(self, cells: Tensor) -> Tensor:
        frames = cells[:, :, None]  # a clip of one frame
        return self.decoder(self.post_quant_conv(frames), frames)
