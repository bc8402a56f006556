"""The files of a checkpoint: a folder or a single file, on disk or fetched from the Hugging Face hub.

Weights are read as a stream, one tensor at a time. Pickled files are opened with torch's weights-only reader. Nothing
here knows what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from underdraw.errors import CheckpointError, ConfigError

EMBEDDED = ("tiny",)
_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.ckpt", "*.yaml", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class Hub:
    """How to fetch what is not on disk."""

    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, or one file. `name` is what the user called it."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def file(self, name: str) -> Path:
        """One of the checkpoint's files, which must be there."""
        path = self.folder / name
        if not path.exists():
            raise CheckpointError(f"{self.name} has no {name}; it belongs into {self.folder}.")
        return path

    def shards(self) -> list[Path]:
        """The files that hold the weights, safetensors before pickles."""
        if self.path.is_file():
            return [self.path]
        for pattern in ("*.safetensors", "*.bin", "*.pt"):
            found = sorted(self.path.glob(pattern))
            if found:
                return found
        raise CheckpointError(f"{self.path} holds no weights (no .safetensors, .bin or .pt file).")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name, one file after the other."""
        for shard in self.shards():
            yield from read_tensors(shard)

    def names(self) -> list[str]:
        """Names of all tensors."""
        names: list[str] = []
        for shard in self.shards():
            names.extend(tensor_names(shard))
        return names


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file. Pickles may wrap their state dict as {"model": ...} or {"state_dict": ...}."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)
        else:
            yield from unwrapped(torch.load(path, map_location="cpu", weights_only=True, mmap=True), path).items()
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read ({reason}); fetch it again.") from error


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors of one file."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); fetch it again.") from error
    return [name for name, _ in read_tensors(path)]


def unwrapped(state: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside what a pickle held."""
    for key in ("model", "module", "state_dict", "ema"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state dict but {type(state).__name__}; give a file of weights.")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def open_checkpoint(name: str | Path, hub: Hub | None = None) -> Checkpoint:
    """An embedded model by its name, a path, or an `owner/name` of the hub."""
    hub = hub or Hub()
    text = str(name)
    if text in EMBEDDED:
        path = Path(str(files("underdraw") / "assets" / text))
    elif Path(text).expanduser().exists():
        path = Path(text).expanduser()
    elif text.count("/") == 1 and not text.startswith((".", "/", "~")) and not Path(text).suffix:
        path = _fetch(text, hub)
    else:
        raise ConfigError(
            f"there is no model {text!r}; give a folder, a file, an owner/name of the Hugging Face hub, "
            f"or {' or '.join(EMBEDDED)}."
        )
    return Checkpoint(path, text, _config(path))


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not path.is_dir() or not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no settings but a {type(config).__name__}; fetch it again.")
    return config


def _fetch(name: str, hub: Hub) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, revision=hub.revision, token=hub.token, cache_dir=hub.cache_dir,
                local_files_only=hub.local_files_only, allow_patterns=_PATTERNS,
            )
        )  # fmt: skip
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name} could not be fetched from the Hugging Face hub ({reason}); check the name, your token and the "
            "connection, or give a folder."
        ) from error
