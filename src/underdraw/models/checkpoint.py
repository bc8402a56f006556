"""The files of a checkpoint: a folder or a single file, on disk or fetched from the Hugging Face hub.

Weights are read as a stream, one tensor at a time. Pickled files are opened with torch's weights-only reader. Nothing
here knows what the tensors mean.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from underdraw.errors import CheckpointError, ConfigError

EMBEDDED = ("tiny",)
FILES = "UNDERDRAW_FILES"  # the environment variable with further folders to look for companions in
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.ckpt", "*.yaml", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How to fetch what is not on disk."""

    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder, or one file. `name` is what the user called it, `hub` how to fetch what is missing."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    hub: HubOptions = HubOptions()

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def file(self, name: str) -> Path:
        """One of the checkpoint's files, which must be there."""
        path = self.folder / name
        if not path.exists():
            raise CheckpointError(f"{self.name} has no {name}; it belongs into {self.folder}.")
        return path

    def settings(self, name: str) -> dict[str, Any]:
        """One of the checkpoint's JSON files, empty where there is none."""
        path = self.folder / name
        return read_json(path) if path.exists() else {}

    def companion(self, names: Sequence[str]) -> Path | None:
        """A file or folder that a model needs and that its authors publish elsewhere, if it is on disk.

        Looked for beside the weights, one folder up, and in the folders of the environment variable UNDERDRAW_FILES.
        """
        own = [Path(part).expanduser() for part in os.environ.get(FILES, "").split(os.pathsep) if part]
        for folder in (self.folder, self.folder.parent, *own):
            for name in names:
                if (folder / name).exists():
                    return folder / name
        return None

    def fetched(self, names: Sequence[str], published: str) -> Path:
        """The same, and if it is not on disk, `owner/name` or `owner/name/file` of the hub."""
        found = self.companion(names)
        if found is not None:
            return found
        try:
            return fetch(published, replace(self.hub, revision=None))  # the revision is that of the model's repository
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.name} also needs {names[0]}, which lies neither in {self.folder} nor in a folder that {FILES} "
                f"names; and {error}"
            ) from error

    def drafter_folders(self) -> tuple[Path, ...]:
        """Folders beside the weights whose names begin with `drafter`."""
        return tuple(path for path in sorted(self.folder.glob("drafter*")) if path.is_dir())

    def shards(self) -> list[Path]:
        """The files that hold the weights: those of the index if there is one, safetensors before pickles."""
        if self.path.is_file():
            return [self.path]
        for index in _INDICES:
            if (self.path / index).exists():
                return [self.file(name) for name in sorted(set(self.settings(index).get("weight_map", {}).values()))]
        for name in _WHOLE:
            if (self.path / name).exists():
                return [self.path / name]
        for suffix in WEIGHTS:
            found = sorted(self.path.glob(f"*{suffix}"))
            if found:
                return found
        raise CheckpointError(f"{self.path} holds no weights (no {', '.join(WEIGHTS)} file).")

    def tensors(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The wanted tensors (all of them by default) with their names, one file after the other."""
        for shard in self.shards():
            yield from read_tensors(shard, wanted)

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of all tensors; no weights are read."""
        return {name: shape for shard in self.shards() for name, shape in tensor_shapes(shard).items()}


def read_tensors(path: Path, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors of one file. Pickles may wrap their state dict as {"model": ...} or {"state_dict": ...}."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if wanted is None or name in wanted:
                        yield name, file.get_tensor(name)
        else:
            for name, tensor in _unpickled(path).items():
                if wanted is None or name in wanted:
                    yield name, tensor
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from error


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors of one file."""
    try:
        known = path.stat()
    except OSError as error:
        raise _damaged(path, error) from error
    return dict(_shapes_of(path, known.st_mtime_ns, known.st_size))


@lru_cache(maxsize=256)
def _shapes_of(path: Path, _: int, __: int) -> dict[str, torch.Size]:
    """Read once for every state of a file: old pickles have to be read whole for it."""
    if path.suffix != ".safetensors":
        return {name: tensor.shape for name, tensor in read_tensors(path)}
    try:
        with safe_open(path, framework="pt") as file:
            return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickle, read by torch's weights-only reader and mapped into memory where the format allows it.

    Training scripts save their arguments beside the weights; an argparse namespace holds values and does nothing.
    """
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (LookupError, TypeError, AttributeError) as error:  # what the reader makes of bytes that are no pickle
            raise pickle.UnpicklingError(str(error)) from error
    return unwrapped(state, path)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    """Why a file cannot be read, in one sentence."""
    if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
        return CheckpointError(f"{path} holds objects that are not weights, and running them would not be safe.")
    # torch's own words for a broken pickle are a paragraph that recommends to run it.
    reason = "no file of weights" if isinstance(error, pickle.UnpicklingError) else first_line(error)
    return CheckpointError(f"{path} cannot be read ({reason}); it is damaged or incomplete: fetch it again.")


def first_line(error: Exception) -> str:
    """What an error says, without what follows on further lines."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def unwrapped(state: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside what a pickle held."""
    for key in ("model", "module", "state_dict", "ema"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state dict but {type(state).__name__}; give a file of weights.")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def open_checkpoint(name: str | Path, hub: HubOptions | None = None) -> Checkpoint:
    """An embedded model by its name, a path, or an `owner/name` or `owner/name/file` of the hub."""
    hub = hub or HubOptions()
    text = str(name)
    if text in EMBEDDED:
        path = Path(str(files("underdraw") / "assets" / text))
    elif Path(text).expanduser().exists():
        path = Path(text).expanduser()
    elif is_hub_id(text):
        path = fetch(text, hub)
    else:
        raise ConfigError(
            f"there is no model {text!r}; give a folder, a file, an owner/name of the Hugging Face hub, "
            f"or {' or '.join(EMBEDDED)}."
        )
    return Checkpoint(path, text, read_json(path / "config.json") if (path / "config.json").exists() else {}, hub)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of the hub's: `owner/name`, or `owner/name/file` with a file of weights."""
    parts = name.split("/")
    if name.startswith((".", "/", "~")) or not all(parts):
        return False
    return len(parts) == (3 if name.endswith(WEIGHTS) else 2)


def read_json(file: Path) -> dict[str, Any]:
    """The settings in a file."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no settings but a {type(config).__name__}; fetch it again.")
    return config


def fetch(name: str, hub: HubOptions) -> Path:
    """`owner/name` or `owner/name/file` of the hub, from its cache if it is there."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, repository, *rest = name.split("/", 2)
    try:
        if rest:
            return Path(
                hf_hub_download(
                    f"{owner}/{repository}", rest[0], revision=hub.revision, token=hub.token,
                    cache_dir=hub.cache_dir, local_files_only=hub.local_files_only,
                )
            )  # fmt: skip
        return Path(
            snapshot_download(
                name, revision=hub.revision, token=hub.token, cache_dir=hub.cache_dir,
                local_files_only=hub.local_files_only, allow_patterns=_PATTERNS,
            )
        )  # fmt: skip
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name} could not be fetched from the Hugging Face hub ({first_line(error)}); check the name, your token "
            "and the connection, or give a folder."
        ) from error
