"""The files of a checkpoint: a folder or one file, on disk or downloaded from the Hugging Face hub.

Tensors are read one at a time. Pickles are opened by torch's weights-only unpickler, so no code in them runs. What the
tensors mean is up to the family modules and `weight_map`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underdraw.errors import CheckpointError, ConfigError, first_line
from underdraw.io import check_regular, expand_user, path_inside, read_json_object
from underdraw.models.hub import (
    COMPANIONS,
    DRAFTER_FOLDERS,
    SINGLE_FILES,
    WEIGHT_SUFFIXES,
    CheckFolder,
    HubOptions,
    download,
    download_files,
    download_small_files,
    is_hub_id,
)
from underdraw.nn.weights import open_safetensors, read_safetensors_header

EMBEDDED_MODELS = ("tiny",)
COMPANION_FOLDERS = "UNDERDRAW_FILES"  # environment variable: more folders to look for companion files in
SAVED_CHOICES_FILE = "underdraw.json"  # in a saved folder: its drafter, tree, verifier and image size
TRAINED_BY_UNDERDRAW = "model-0.safetensors"  # the first file that `nn.weights.save_weights` writes into a folder
_CONFIG = "a model configuration"  # in error messages
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, slots=True)
class Companion:
    """A file or folder that a model needs and that may be outside of its folder."""

    names: tuple[str, ...]  # where it may be, relative to the folders that are searched
    hub_id: str | None  # `owner/name` or `owner/name/file`, where the authors publish it; None: it is not downloaded

    @property
    def folder_name(self) -> str:
        """What it is called in the folder of companions of a saved model, if it is a folder."""
        return Path(self.names[0]).stem

    @property
    def candidates(self) -> tuple[str, ...]:
        """All names to search for: one that is a whole repository may have been saved as a folder."""
        is_repository = self.hub_id is not None and self.hub_id.count("/") == 1
        return (*self.names, self.folder_name) if is_repository else self.names


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder or a file of weights, with its config.json."""

    path: Path
    name: str  # as the user gave it; used in error messages
    config: dict[str, Any] = field(default_factory=dict)
    hub: HubOptions = HubOptions()  # for companions that have to be downloaded
    companions: list[Companion] = field(default_factory=list, compare=False)  # what its loader asked for

    @classmethod
    def from_path(cls, path: Path, name: str | None = None, hub: HubOptions | None = None) -> Checkpoint:
        """A checkpoint on disk, with the config.json in its folder if there is one."""
        config = path / "config.json"
        return cls(
            path,
            name or str(path),
            read_json_object(config, _CONFIG, CheckpointError) if config.exists() else {},
            hub or HubOptions(),
        )

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def require_file(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            raise CheckpointError(f"{self.name} has no {name}; put it into {self.folder}.")
        return path

    def read_json(self, name: str) -> dict[str, Any]:
        """One of the checkpoint's JSON files, or {} if it does not exist."""
        path = self.folder / name
        return read_json_object(path, _CONFIG, CheckpointError) if path.exists() else {}

    def recorded_side(self, multiple: int) -> int | None:
        """The side of the square image in the record of a saved pipeline, a multiple of that many pixels."""
        saved = self.read_json(SAVED_CHOICES_FILE).get("size")
        if saved is None:
            return None
        match = re.fullmatch(r"(\d{2,5})x\1", str(saved))
        if match is None or int(match[1]) % multiple or not int(match[1]):
            raise ConfigError(
                f"{SAVED_CHOICES_FILE} of {self.name} has the size {saved!r}, which is no square of a multiple of "
                f"{multiple} pixels; correct it or delete the file."
            )
        return int(match[1])

    def find_companion(self, names: Sequence[str], *, nearby: bool = True) -> Path | None:
        """The first existing file or folder of these names, for parts that the authors publish in another repository.

        Searched in the checkpoint's folder, its `companions` and, if `nearby`, its parent folder and the folders listed
        in $UNDERDRAW_FILES.
        """
        listed = [expand_user(part) for part in os.environ.get(COMPANION_FOLDERS, "").split(os.pathsep) if part]
        folders = [self.folder, self.folder / COMPANIONS, *([self.folder.parent, *listed] if nearby else ())]
        for folder in folders:
            for name in names:
                if (folder / name).exists():
                    return folder / name
        return None

    def find_or_download(self, names: Sequence[str], hub_id: str) -> Path:
        """`find_companion`, or else download `owner/name` or `owner/name/file` from the hub."""
        path = self.find_companion(self.declare_companion(names, hub_id).candidates)
        if path is not None:
            return path
        try:
            return download(hub_id, replace(self.hub, revision=None))  # `revision` belongs to the model's repository
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.name} also needs {names[0]}, which is neither in {self.folder} nor in a folder listed in "
                f"{COMPANION_FOLDERS}; and {error}"
            ) from error

    def declare_companion(self, names: Sequence[str], hub_id: str | None) -> Companion:
        """Record that the model needs a companion, so that saved copies include it."""
        companion = Companion(tuple(names), hub_id)
        if companion not in self.companions:
            self.companions.append(companion)
        return companion

    def drafter_folders(self) -> tuple[Path, ...]:
        """Subfolders of the checkpoint whose names begin with `drafter`."""
        return tuple(path for path in sorted(self.folder.glob(DRAFTER_FOLDERS)) if path.is_dir())

    def weight_files(self) -> list[Path]:
        """The files with the weights: safetensors preferred to pickles, and those in an index to a single file."""
        if self.path.is_file():
            return [self.path]
        for index, single in zip(INDEX_FILES, SINGLE_FILES, strict=True):
            if (self.path / index).exists():
                return self._indexed_files(index)
            if (self.path / single).exists():
                return [self.path / single]
        for suffix in WEIGHT_SUFFIXES:
            if paths := sorted(self.path.glob(f"*{suffix}")):
                return paths
        raise CheckpointError(f"{self.path} holds no weights (no {', '.join(WEIGHT_SUFFIXES)} file).")

    def _indexed_files(self, index: str) -> list[Path]:
        """The files that an index names, all of them inside the checkpoint's folder."""
        weight_map = self.read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / index} has no weight_map; download it again.")
        names = {str(path_inside(Path(), name, str(self.path / index))) for name in weight_map.values()}
        return [self.require_file(name) for name in sorted(names)]

    def tensors(self, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the wanted tensors, by default all of them, file by file."""
        for path in self.weight_files():
            yield from read_tensors(path, wanted)

    def shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of all tensors, without reading the weights of safetensors files."""
        return {name: shape for path in self.weight_files() for name, shape in tensor_shapes(path).items()}


def read_tensors(path: Path, wanted: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the wanted tensors in one file."""
    try:
        if path.suffix == ".safetensors":
            with open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if wanted is None or name in wanted:
                        yield name, file.get_tensor(name)
        else:
            for name, tensor in _unpickle(path).items():
                if wanted is None or name in wanted:
                    yield name, tensor
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in one file."""
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return dict(_cached_shapes(path, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=256)
def _cached_shapes(path: Path, _mtime: int, _size: int) -> dict[str, torch.Size]:
    """Cached until the file changes, because old pickles have to be read completely to list their tensors."""
    if path.suffix != ".safetensors":
        return {name: tensor.shape for name, tensor in read_tensors(path)}
    return {name: torch.Size(info.shape) for name, info in read_safetensors_header(path)[0].items()}


def _unpickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, memory-mapped where the format (zip) allows it."""
    check_regular(path, "a file of weights", CheckpointError)
    # Training scripts often save their argparse arguments with the weights; a Namespace only holds values.
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            is_zip = zipfile.is_zipfile(path)
            if is_zip:
                _refuse_compressed(path)
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except (LookupError, TypeError, AttributeError, struct.error, AssertionError) as error:  # not a pickle
            raise pickle.UnpicklingError(str(error)) from error
    return _find_state_dict(state, path)


def _refuse_compressed(path: Path) -> None:
    """Raise for a zip file that unpacks to more than it holds; torch stores tensors uncompressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile as error:
        raise pickle.UnpicklingError(str(error)) from error
    if unpacked > path.stat().st_size:
        raise pickle.UnpicklingError(f"it would unpack to {unpacked} bytes")


def _find_state_dict(state: Any, path: Path) -> dict[str, Tensor]:
    """The state dict, which training scripts may wrap as {"model": ...} and the like."""
    for key in ("model", "module", "state_dict", "ema"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state dict but {type(state).__name__}; give a file of weights.")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """An error of one sentence for a file that cannot be read."""
    if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
        return CheckpointError(f"{path} holds objects that are not weights, and running them would not be safe.")
    # torch's message for a broken pickle is a paragraph that recommends to load it unsafely.
    reason = "not a file of weights" if isinstance(error, pickle.UnpicklingError) else first_line(error)
    return CheckpointError(f"{path} cannot be read ({reason}); it is damaged or incomplete: download it again.")


def open_small_files(name: str, hub: HubOptions | None = None) -> Path:
    """The folder of a checkpoint; of a repository of the hub, no weights are downloaded."""
    hub = hub or HubOptions()
    if name in EMBEDDED_MODELS or expand_user(name).exists() or not is_hub_id(name):
        return open_checkpoint(name, hub).folder
    repository = "/".join(name.split("/")[:2])
    folder, _ = download_small_files(repository, hub)
    return folder or download_files(repository, hub, [])


def open_checkpoint(name: str | Path, hub: HubOptions | None = None, check: CheckFolder | None = None) -> Checkpoint:
    """Open an embedded model by name, a path, or an `owner/name` or `owner/name/file` of the hub.

    `check` sees the configuration of a hub repository before its weights are downloaded.
    """
    hub = hub or HubOptions()
    text = str(name)
    if text in EMBEDDED_MODELS:
        path = Path(str(files("underdraw") / "assets" / text))
    elif expand_user(text).exists():
        path = expand_user(text)
    elif is_hub_id(text):
        path = download(text, hub, check)
    else:
        raise ConfigError(
            f"there is no model {text!r}; give a folder, a file, an owner/name of the Hugging Face hub, "
            f"or {' or '.join(EMBEDDED_MODELS)}."
        )
    return Checkpoint.from_path(path, text, hub)
