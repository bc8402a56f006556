"""Weights on disk: sharded safetensors files in bfloat16, large matrices optionally in int8 with a scale per row.

An int8 matrix `name` is stored with `name.scale`, one float32 per row. The metadata of every shard holds an `about`
dictionary, which describes the weights, and the number of shards.
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

SHARD_BYTES = 15 * 2**20
SCALE = ".scale"  # ends the names of the scales of int8 matrices
_MIN_INT8_VALUES = 4096  # smaller tensors stay in bfloat16


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values, rounded to nearest, and a float32 scale per row (first dimension)."""
    rows = weight.detach().float().flatten(1)
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    return (rows / scale[:, None]).round().to(torch.int8).view(weight.shape), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 weight of `quantize_rows`."""
    return values.float() * scale.view(-1, *[1] * (values.ndim - 1))


def save_weights(
    folder: str | Path,
    state: Mapping[str, Tensor],
    about: Mapping[str, Any],
    precision: Literal["bf16", "int8"] = "bf16",
) -> list[Path]:
    """Write a state dict as model-I.safetensors files into a folder, replacing older ones; return their paths.

    Shards get their names only when all are written, the first last, so that a folder never looks complete too early.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shard(_to_stored(state, precision))
    metadata = {"about": json.dumps(dict(about)), "shards": str(len(shards))}
    paths = [folder / f"model-{index}.safetensors" for index in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        save_file(shard, path.with_suffix(".part"), metadata=metadata)
    for path in reversed(paths):
        path.with_suffix(".part").replace(path)
    for path in folder.glob("model-*.safetensors"):
        if path not in paths:
            path.unlink()
    return paths


def _to_stored(state: Mapping[str, Tensor], precision: Literal["bf16", "int8"]) -> dict[str, Tensor]:
    """The tensors of a state dict as they are stored."""
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if precision == "int8" and value.ndim >= 2 and value.numel() >= _MIN_INT8_VALUES:
            stored[name], stored[name + SCALE] = (part.cpu().contiguous() for part in quantize_rows(value))
        else:
            stored[name] = value.detach().to("cpu", torch.bfloat16).contiguous()
    return stored


def _shard(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors in order, in as few shards of at most SHARD_BYTES as that takes; a larger tensor has its own."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size + value.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    return shards


def load_weights(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the weights of a folder in float32, and their `about` dictionary."""
    folder = Path(folder)
    first = folder / "model-0.safetensors"
    if not first.exists():
        raise CheckpointError(
            f"{folder} holds no weights (there is no model-0.safetensors); pass the folder that training wrote."
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
            f"the weights in {folder} are damaged or incomplete ({error}); download or write them again."
        ) from error
    scales = {name: state.pop(name) for name in list(state) if name.endswith(SCALE)}
    return {
        name: dequantize_rows(value, scales[name + SCALE]) if name + SCALE in scales else value.float()
        for name, value in state.items()
    }, about
