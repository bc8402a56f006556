"""Cosmos's discrete video decoder as its authors have it: causal in time, for clips. Shares no code with src."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = (8, 8, 8, 5, 5, 5)


class CausalConv(nn.Module):
    """A convolution over (B, C, T, H, W); the first frame is repeated before it, zeros surround it in space."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv3d = nn.Conv3d(inputs, outputs, kernel)
        self.time, self.space = kernel[0] - 1, kernel[1] // 2

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :, :1].expand(-1, -1, self.time, -1, -1), x], dim=2)
        return self.conv3d(F.pad(x, (self.space,) * 4))


def factorised(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(CausalConv(inputs, outputs, (1, 3, 3)), CausalConv(outputs, outputs, (3, 1, 1)))


class FrameNorm(nn.Module):
    """One group over the channels and cells of each frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.norm(frame) for frame in x.unbind(2)], dim=2)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = FrameNorm(inputs), factorised(inputs, outputs)
        self.norm2, self.conv2 = FrameNorm(outputs), factorised(outputs, outputs)
        self.nin_shortcut = CausalConv(inputs, outputs, (1, 1, 1)) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class Attention(nn.Module):
    """Over the cells of each frame, or causally over the frames of each cell."""

    def __init__(self, width: int, *, over_time: bool) -> None:
        super().__init__()
        self.over_time = over_time
        self.norm = FrameNorm(width)
        self.q, self.k, self.v, self.proj_out = (CausalConv(width, width, (1, 1, 1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (part(normed).movedim(1, -1) for part in (self.q, self.k, self.v))  # (B, T, H, W, C)
        if self.over_time:
            q, k, v = (part.movedim(1, 3) for part in (q, k, v))  # (B, H, W, T, C)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).movedim(3, 1)
        else:
            flat = (part.flatten(2, 3) for part in (q, k, v))
            mixed = F.scaled_dot_product_attention(*flat).unflatten(2, x.shape[-2:])
        return x + self.proj_out(mixed.movedim(-1, 1))


class Upsample(nn.Module):
    """For a single frame: time is not doubled, but its convolution runs where the level doubles time."""

    def __init__(self, width: int, *, temporal: bool) -> None:
        super().__init__()
        self.temporal = temporal
        self.conv1 = CausalConv(width, width, (3, 1, 1))
        self.conv2 = CausalConv(width, width, (1, 3, 3))
        self.conv3 = CausalConv(width, width, (1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.temporal:
            x = self.conv1(x) + x
        x = x.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4)
        return self.conv3(self.conv2(x) + x)


def inverse_haar(x: Tensor, dim: int) -> Tensor:
    """Undo a Haar transform along one axis: the first half of the channels are sums, the second differences."""
    low, high = x.chunk(2, dim=1)
    return torch.stack([low + high, low - high], dim=dim + 1).flatten(dim, dim + 1) * 0.5**0.5


class Decoder(nn.Module):
    def __init__(self, width: int, mults: Sequence[int], latent: int) -> None:
        super().__init__()
        widths = [width * mult for mult in mults]
        lowest = widths[-1]
        self.conv_in = factorised(latent, lowest)
        self.mid = nn.Module()
        self.mid.block_1 = Residual(lowest, lowest)
        self.mid.attn_1 = nn.Sequential(Attention(lowest, over_time=False), Attention(lowest, over_time=True))
        self.mid.block_2 = Residual(lowest, lowest)
        self.up = nn.ModuleList()
        for index, out in enumerate(widths):
            level = nn.Module()
            before = widths[min(index + 1, len(widths) - 1)]
            level.block = nn.ModuleList(Residual(before if block == 0 else out, out) for block in range(3))
            if index:
                level.upsample = Upsample(out, temporal=index == 1)
            self.up.append(level)
        self.norm_out = FrameNorm(widths[0])
        self.conv_out = factorised(widths[0], 192)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid.block_2(self.mid.attn_1(self.mid.block_1(self.conv_in(z))))
        for index in reversed(range(len(self.up))):
            for block in self.up[index].block:
                x = block(x)
            if index:
                x = self.up[index].upsample(x)
        x = self.conv_out(F.silu(self.norm_out(x)))
        for _ in range(2):  # the channels are in the order of time, then rows, then columns
            x = inverse_haar(inverse_haar(inverse_haar(x, 2), 3), 4) * 8**0.5
        return x[:, :, 3:]  # the frames before the first are its copies


class CosmosVideoDecoder(nn.Module):
    """Codes (B, 1, H, W) of one frame to pixels (B, 3, 1, 16 H, 16 W)."""

    def __init__(self, width: int, mults: Sequence[int], latent: int) -> None:
        super().__init__()
        self.post_quant_conv = CausalConv(len(LEVELS), latent, (1, 1, 1))
        self.decoder = Decoder(width, mults, latent)

    def forward(self, codes: Tensor) -> Tensor:
        values, rest = [], codes
        for level in LEVELS:
            values.append((rest % level - level // 2).float() / (level // 2))
            rest = rest // level
        return self.decoder(self.post_quant_conv(torch.stack(values, dim=1)))
