"""Weights on disk: sharded safetensors files in bfloat16, large matrices optionally in int8 with a scale per row.

An int8 matrix `name` is stored with `name.scale`, one float32 per row. The metadata of every shard holds an `about`
dictionary, which describes the weights, and the number and names of the shards.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.io import atomic_write, check_regular, open_regular, parse_json, path_inside, remove_unfinished
from underdraw.nn.quantized_weight import QuantizedWeight, quantize

MAX_HEADER_BYTES = 10**8  # of a safetensors file, as the format says
SHARD_BYTES = 15 * 2**20
SCALE = ".scale"  # ends the names of the scales of int8 matrices
MAX_SHARDS = 10**4
_MIN_INT8_VALUES = 4096  # smaller tensors stay in bfloat16


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically; missing parent folders are created.

    The library writes metadata in random order; here the same content gives the same bytes.
    """
    raw = save({name: value.cpu().contiguous() for name, value in tensors.items()}, metadata)
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(memoryview(raw)[8 + length :])


def save_weights(
    folder: str | Path,
    state: Mapping[str, Tensor],
    about: Mapping[str, Any],
    precision: Literal["bf16", "int8"] = "bf16",
) -> list[Path]:
    """Write a state dict as model-I.safetensors files into a folder, replacing older ones; return their paths.

    The first file names the others and is replaced last, by a rename. Until then the older set stays complete: the
    others get names that it does not use.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    shards = _shard(_to_stored(state, precision))
    older = _stored_names(folder)
    names = ["model-0.safetensors"]
    for index in range(1, len(shards)):
        usual = f"model-{index}.safetensors"
        names.append(usual if usual not in older else f"model-{index}-b.safetensors")
    metadata = {"about": json.dumps(dict(about)), "shards": str(len(shards)), "files": json.dumps(names)}
    for name, shard in reversed(list(zip(names, shards, strict=True))):
        write_safetensors(folder / name, shard, metadata)
    for path in folder.glob("model-*.safetensors"):
        if path.name not in names:
            path.unlink()
    return [folder / name for name in names]


def _stored_names(folder: Path) -> list[str]:
    """The files of the weights in a folder, or [] if it holds none that can be read."""
    try:
        return [path.name for path in weight_files(folder)]
    except CheckpointError:
        return []


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights that `save_weights` wrote into a folder."""
    first = folder / "model-0.safetensors"
    if not first.exists():
        raise CheckpointError(
            f"{folder} holds no weights (there is no model-0.safetensors); pass the folder that training wrote."
        )
    metadata = read_safetensors_header(first)[1]
    try:
        count = int(metadata["shards"])
        names = [f"model-{index}.safetensors" for index in range(count)] if 0 < count <= MAX_SHARDS else []
        names = parse_json(metadata["files"]) if "files" in metadata else names
        if len(names) != count or names[0] != first.name:
            raise ValueError(f"{len(names)} names of {count} files")
    except (KeyError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{first} does not say which files belong to it ({error}); write it again.") from None
    return [path_inside(folder, name, str(first)) for name in names]


def _to_stored(state: Mapping[str, Tensor], precision: Literal["bf16", "int8"]) -> dict[str, Tensor]:
    """The tensors of a state dict as they are stored."""
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if precision == "int8" and value.ndim >= 2 and value.numel() >= _MIN_INT8_VALUES:
            rows, stored[name + SCALE] = quantize(value.flatten(1), "int8").to_stored()
            stored[name] = rows.view(value.shape)
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
    """Read the weights of a folder in float32, and their `about` dictionary; all values are finite."""
    state, quantized, about = load_stored_weights(folder)
    return {**state, **{name: weight.dequantize() for name, weight in quantized.items()}}, about


def load_stored_weights(
    folder: str | Path,
) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight], dict[str, Any]]:
    """Read the weights of a folder: those in float32, the quantised matrices as they are, and `about`."""
    folder = Path(folder)
    state: dict[str, Tensor] = {}
    paths = weight_files(folder)
    for path in paths:
        if not path.exists():
            raise CheckpointError(f"the weights in {folder} are incomplete: {path.name} is missing; write them again.")
        with open_safetensors(path) as file:
            state.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    try:
        about = parse_json(read_safetensors_header(paths[0])[1]["about"])
        if not isinstance(about, dict):
            raise ValueError("its description is no JSON object")
        weights, quantized = _split_quantized(state)
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the weights in {folder} are damaged or incomplete ({error}); download or write them again."
        ) from error
    check_finite({**weights, **{name + SCALE: weight.scale for name, weight in quantized.items()}}, str(folder))
    return weights, quantized, about


def _split_quantized(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, QuantizedWeight]]:
    """Stored tensors in float32, and quantised matrices as they are."""
    weights, quantized = {}, {}
    for name, value in state.items():
        if name + SCALE in state:
            weight = QuantizedWeight.from_stored(value.flatten(1), state[name + SCALE])
            if value.ndim == 2:
                quantized[name] = weight
            else:
                weights[name] = weight.dequantize().reshape(value.shape)
        elif not name.endswith(SCALE):
            weights[name] = value.float()
        elif name.removesuffix(SCALE) not in state:
            raise KeyError(name.removesuffix(SCALE))
    return weights, quantized


def check_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise for weights that are NaN or infinite, by name: a sum is finite only if all of its terms are."""
    # Packed weights (`nn.onednn`) were checked before they were packed.
    floats = {name: value for name, value in tensors.items() if value.is_floating_point() and not value.is_mkldnn}
    if not floats:
        return
    sums = torch.stack([value.sum(dtype=torch.float32) for value in floats.values()])
    for (name, value), total in zip(floats.items(), sums.tolist(), strict=True):
        if not math.isfinite(total) and not bool(value.isfinite().all()):  # the sum alone may be too large
            raise CheckpointError(
                f"{name} of {source} holds values that are not finite in {str(value.dtype).removeprefix('torch.')}; "
                "download or train it again."
            )


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading its tensors; all that can be wrong with it is one sentence."""
    read_safetensors_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


class TensorInfo(NamedTuple):
    """Type and shape of a tensor in a safetensors file."""

    dtype: str  # as in the file, for example "BF16"
    shape: tuple[int, ...]


_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16}
_BITS |= {"BF16": 16, "U32": 32, "I32": 32, "F32": 32, "C64": 64, "U64": 64, "I64": 64, "F64": 64, "F4": 4}


def read_safetensors_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a safetensors file, whose offsets, shapes and types are consistent with its size."""
    what = "a safetensors file"
    size = check_regular(path, what, CheckpointError)
    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        with open_regular(path, what, CheckpointError) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = parse_json(file.read(length).decode())
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are not text")
        tensors = {name: _tensor_info(name, entry, size - 8 - length) for name, entry in header.items()}
        stored = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
        if stored != size - 8 - length:
            raise ValueError(f"its tensors have {stored} bytes and the file has {size - 8 - length}")
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        detail = f"no {reason}" if isinstance(reason, KeyError) else str(reason)
        raise _damaged(path, detail) from None
    return tensors, metadata


def _damaged(path: Path, reason: object) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read ({reason}); it is damaged or incomplete: download it again.")


def _tensor_info(name: str, entry: Any, size: int) -> TensorInfo:
    """One entry of a header; `size` is that of all tensors in bytes."""
    begin, end = entry["data_offsets"]
    shape, bits = tuple(entry["shape"]), _BITS.get(entry["dtype"])
    if not all(type(value) is int and value >= 0 for value in (begin, end, *shape)) or not begin <= end <= size:
        raise ValueError(f"the tensor {name!r} has the shape {shape} and the offsets {begin} and {end}")
    if bits is not None and math.prod(shape) * bits != 8 * (end - begin):
        raise ValueError(f"the tensor {name!r} of {end - begin} bytes has the shape {shape}")
    return TensorInfo(entry["dtype"], shape)
