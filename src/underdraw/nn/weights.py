"""Weights on disk: safetensors files of a limited size, matrices in 8 bits per row where that is asked for.

A quantised matrix `name` is stored as int8 with `name.scale`, one float per row; everything else is bfloat16. The
metadata of the first file says what the weights are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from underdraw.errors import CheckpointError

SHARD = 15 * 2**20  # bytes a file
SCALE = ".scale"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values and a float32 scale per row (first dimension), by rounding to nearest."""
    rows = weight.detach().float().flatten(1)
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scale[:, None]).round().to(torch.int8).view(weight.shape), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale.view(-1, *[1] * (values.ndim - 1))


def save_weights(
    folder: str | Path,
    state: Mapping[str, Tensor],
    about: Mapping[str, Any],
    precision: Literal["bf16", "int8"] = "bf16",
) -> list[Path]:
    """Write `state` as model-I.safetensors files into a folder; the last rename makes the whole set visible."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if precision == "int8" and value.ndim >= 2 and value.numel() >= 4096:
            tensors[name], tensors[name + SCALE] = (part.cpu().contiguous() for part in quantise(value))
        else:
            tensors[name] = value.detach().to("cpu", torch.bfloat16).contiguous()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size + value.nbytes > SHARD and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    paths = []
    for index, shard in enumerate(shards):
        path = folder / f"model-{index}.safetensors"
        metadata = {"about": json.dumps(dict(about)), "shards": str(len(shards))}
        save_file(shard, path.with_suffix(".part"), metadata=metadata)
        paths.append(path)
    for path in reversed(paths):
        path.with_suffix(".part").replace(path)
    for path in folder.glob("model-*.safetensors"):
        if path not in paths:
            path.unlink()
    return paths


def load_weights(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Float32 weights and what is known about them."""
    folder = Path(folder)
    first = folder / "model-0.safetensors"
    if not first.exists():
        raise CheckpointError(
            f"{folder} holds no weights (there is no model-0.safetensors); give the folder that training wrote."
        )
    state: dict[str, Tensor] = {}
    try:
        with safe_open(first, framework="pt") as file:
            metadata = file.metadata() or {}
        about, count = json.loads(metadata["about"]), int(metadata["shards"])
        for index in range(count):
            with safe_open(folder / f"model-{index}.safetensors", framework="pt") as file:
                state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(
            f"the weights in {folder} are damaged or incomplete ({error}); fetch or write them again."
        ) from error
    scales = {name: state.pop(name) for name in list(state) if name.endswith(SCALE)}
    return {
        name: dequantise(value, scales[name + SCALE]) if name + SCALE in scales else value.float()
        for name, value in state.items()
    }, about
