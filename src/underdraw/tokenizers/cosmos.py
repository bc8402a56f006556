"""Cosmos's discrete video tokenizer (DV8x16x16), the decoder for single images.

The published network is three-dimensional: convolutions over space are followed by convolutions over time, which repeat
the first frame before it. An image is one frame, so every tap of a convolution over time sees the same input, and
attention over time sees one position. `single_frame_state` folds both into the two-dimensional convolutions here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.errors import CheckpointError, UnsupportedError, first_line
from underdraw.tokenizers.blocks import MiddleBlock, group_norm, resolution_levels, run_decoder_levels, swish

HAAR_STEPS = 2  # each doubles both sides
_IGNORED = re.compile(r"inv_quant\.|quantizer\.|decoder\.unpatcher3d\.")  # constants, which are computed here


@dataclass(frozen=True, slots=True)
class CosmosArch:
    """The architecture of the decoder."""

    widths: tuple[int, ...] = (256, 512, 512)  # from the highest resolution to the lowest
    blocks: int = 3  # residual blocks of a level
    latent: int = 16
    levels: tuple[int, ...] = (8, 8, 8, 5, 5, 5)  # of finite scalar quantisation (FSQ)

    @property
    def downsample(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (HAAR_STEPS + len(self.widths) - 1)

    @property
    def patch_channels(self) -> int:
        """Channels of a cell before the inverse Haar transforms: a cube of pixels and frames."""
        return 3 * 8**HAAR_STEPS

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], levels: tuple[int, ...] = (8, 8, 8, 5, 5, 5)) -> CosmosArch:
        """The architecture of a folded state dict."""
        counts = [int(name.split(".")[2]) for name in state if name.startswith("decoder.up.")]
        try:
            widths = tuple(
                len(state[f"decoder.up.{level}.block.0.conv2.weight"]) for level in range(max(counts, default=-1) + 1)
            )
            count = sum(bool(re.fullmatch(r"decoder\.up\.0\.block\.\d+\.conv1\.weight", name)) for name in state)
            arch = cls(widths, count, len(state["post_quant_conv.weight"]), levels)
        except KeyError as error:
            raise CheckpointError(f"the image tokenizer has no {error.args[0]}; its file is incomplete.") from error
        if not widths or state["post_quant_conv.weight"].shape[1] != len(levels):
            raise CheckpointError("the image tokenizer is not the discrete one of Cosmos; use its decoder.jit.")
        return arch


_norm = group_norm(1)


class FrameAttention(nn.Module):
    """Attention over the time of a single frame, with a skip connection: its only value, projected."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(self.v(self.norm(x)))


class HybridUpsample(nn.Module):
    """Nearest-neighbour upsampling by 2 with residual convolutions; `temporal` ones also double the frames."""

    def __init__(self, width: int, *, temporal: bool) -> None:
        super().__init__()
        self.temporal = temporal
        self.conv1 = nn.Conv2d(width, width, 1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.temporal:
            x = x + self.conv1(x)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv3(x + self.conv2(x))


class CosmosDecoder(nn.Module):
    """Latents (B, C, H, W) to pixels (B, 3, H * 16, W * 16)."""

    def __init__(self, arch: CosmosArch) -> None:
        super().__init__()
        lowest, last = arch.widths[-1], len(arch.widths) - 1
        self.conv_in = nn.Conv2d(arch.latent, lowest, 3, padding=1)
        self.mid = MiddleBlock(lowest, _norm)
        self.mid.attn_1 = nn.Sequential(self.mid.attn_1, FrameAttention(lowest))
        self.up = resolution_levels(arch.widths, arch.blocks, _norm, (), up=True)
        for index, width in enumerate(arch.widths[1:], start=1):
            self.up[index].upsample = HybridUpsample(width, temporal=index < last)
        self.norm_out = _norm(arch.widths[0])
        self.conv_out = nn.Conv2d(arch.widths[0], arch.patch_channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = run_decoder_levels(self.up, self.mid(self.conv_in(latents)))
        x = self.conv_out(swish(self.norm_out(x)))
        for _ in range(HAAR_STEPS):
            x = last_frame_of_inverse_haar(x)
        return x


def last_frame_of_inverse_haar(x: Tensor) -> Tensor:
    """Undo one Haar transform over time, rows and columns, for the later frame: (B, 8 C, H, W) -> (B, C, 2 H, 2 W)."""
    low, high = x.unflatten(1, (2, 2, 2, -1)).unbind(1)  # by time; then (B, rows, columns, C, H, W)
    bands = low - high
    rows = torch.stack([bands[:, 0] + bands[:, 1], bands[:, 0] - bands[:, 1]], dim=-2)  # (B, columns, C, H, 2, W)
    pixels = torch.stack([rows[:, 0] + rows[:, 1], rows[:, 0] - rows[:, 1]], dim=-1)  # (B, C, H, 2, W, 2)
    return pixels.flatten(-2).flatten(2, 3)


class CosmosTokenizer(nn.Module):
    """The image tokenizer of SimpleAR: codes to pixels."""

    codebook: Tensor  # (K, D)

    def __init__(self, arch: CosmosArch) -> None:
        super().__init__()
        self.arch = arch
        self.post_quant_conv = nn.Conv2d(len(arch.levels), arch.latent, 1)
        self.decoder = CosmosDecoder(arch)
        counts = torch.tensor(arch.levels, device="cpu")
        strides = torch.cumprod(torch.tensor([1, *arch.levels[:-1]], device="cpu"), 0)
        digits = torch.arange(math.prod(arch.levels), device="cpu")[:, None] // strides % counts
        self.register_buffer("codebook", (digits - counts // 2) / (counts // 2), persistent=False)

    @property
    def downsample(self) -> int:
        return self.arch.downsample

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Images of codes, clamped to [-1, 1]: (B, H, W) -> (B, 3, H * 16, W * 16)."""
        cells = self.codebook[codes].movedim(-1, 1)
        return cast(Tensor, self.decoder(self.post_quant_conv(cells))).clamp(-1, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        raise UnsupportedError("the encoder of Cosmos's tokenizer is not supported; draw images from texts.")


def single_frame_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold the tensors of the published decoder into those of `CosmosTokenizer`.

    A convolution over time becomes the sum of its taps; one that follows a convolution over space is multiplied into
    it. Queries and keys of attention over time have no effect on one frame.
    """
    flat = {
        re.sub(r"(norm\w*)\.norm\.", r"\1.", name.replace(".conv3d.", ".")): value.float()
        for name, value in state.items()
        if not _IGNORED.match(name)
    }
    folded: dict[str, Tensor] = {}
    for name, value in flat.items():
        if re.search(r"attn_1\.1\.[qk]\.", name):
            continue
        pair = re.fullmatch(r"(.*(?:conv1|conv2|conv_in|conv_out))\.([01])\.(weight|bias)", name)
        if pair is None:
            folded[name] = value.sum(2) if value.ndim == 5 else value
        elif pair[2] == "0" and pair[3] == "weight":
            base = pair[1]
            after = flat[f"{base}.1.weight"].sum(2).flatten(1)  # (out, middle)
            folded[f"{base}.weight"] = torch.einsum("om,mihw->oihw", after, value.sum(2))
            folded[f"{base}.bias"] = after @ flat[f"{base}.0.bias"] + flat[f"{base}.1.bias"]
    return folded


def load_cosmos(path: Path, device: torch.device) -> CosmosTokenizer:
    """Load the published decoder.jit, a TorchScript file, of which only the weights are used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated, but the file is what it is
            state = torch.jit.load(str(path), map_location="cpu").state_dict()
    except (RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}); download it again.") from error
    folded = single_frame_state(state)
    model = CosmosTokenizer(CosmosArch.from_state(folded))
    try:
        model.load_state_dict(folded)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise CheckpointError(f"{path} is not Cosmos's decoder ({lines[-1].strip()}); download it again.") from error
    return model.to(device).eval().requires_grad_(False)
