"""Downloads from the Hugging Face hub: the small files of a repository first, then only the weights that are needed.

A repository often holds the same weights twice (safetensors and pickles), or another kind of model altogether. So its
files are listed before any weights are fetched, and `check` sees the configuration in time to refuse it.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

import torch

from underdraw.errors import CapacityError, CheckpointError, ConfigError, first_line

log = logging.getLogger(__name__)

COMPANIONS = "companions"  # subfolder of saved models with the files that their authors publish elsewhere
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Formats of weights, the preferred one first: a folder that has several of them holds the same weights twice.
_FORMATS = ((".safetensors",), (".bin",), (".pt", ".pth", ".ckpt"))
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")  # all weights in one file; shards have an index
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".yaml", ".model", ".tiktoken")
_DRAFTER_FOLDERS = "drafter*"
_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Options of downloads from the Hugging Face hub, as in `from_pretrained`."""

    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False

    def __post_init__(self) -> None:
        for name in ("revision", "token", "cache_dir"):
            value = getattr(self, name)
            is_token = name == "token" and isinstance(value, bool)  # True: the one that is logged in
            if value is not None and not is_token and not isinstance(value, str | Path):
                raise ConfigError(f"{name} {value!r} is no text; pass a str or None.")

    def as_arguments(self) -> dict[str, Any]:
        """The arguments of huggingface_hub's functions."""
        return {
            "revision": self.revision,
            "token": self.token,
            "cache_dir": self.cache_dir,
            "local_files_only": self.local_files_only,
        }


@dataclass(frozen=True, slots=True)
class RepositoryFile:
    """A file of a repository and its size in bytes."""

    name: str
    size: int

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def base_name(self) -> str:
        return self.name.rpartition("/")[2]


CheckFolder = Callable[[Path], Sequence[str]]
"""Raises an error if the configuration in a folder is of no use; returns the subfolders whose weights are needed."""


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/name`, or `owner/name/file` where the file has a suffix of weights."""
    parts = name.split("/")
    if name.startswith((".", "/", "~")) or not all(parts):
        return False
    return len(parts) == (3 if name.endswith(WEIGHT_SUFFIXES) else 2)


def download(hub_id: str, hub: HubOptions, check: CheckFolder | None = None) -> Path:
    """Download `owner/name` or `owner/name/file`, unless the hub's cache has it; returns the folder or the file."""
    owner, repository, *file = hub_id.split("/", 2)
    if file:
        name, arguments = f"{owner}/{repository}", hub.as_arguments()
        return _run(hub_id, lambda api: Path(api.hf_hub_download(name, file[0], **arguments)))
    folder, files = download_small_files(hub_id, hub)
    if not files:  # offline: what the cache has
        return download_files(hub_id, hub, [f"*{suffix}" for suffix in (*_SMALL_SUFFIXES, *WEIGHT_SUFFIXES)])
    _refuse_several_models(hub_id, files)
    weights = select_weights(files, check(folder) if check else ())
    _check_disk(hub_id, hub, weights)
    small = [f for f in files if f.name.endswith(_SMALL_SUFFIXES)]
    return download_files(hub_id, hub, [f.name for f in (*small, *weights)])


def download_small_files(hub_id: str, hub: HubOptions) -> tuple[Path, list[RepositoryFile]]:
    """Download the configuration and text files of a repository; returns their folder and all files, [] if offline."""
    files = [] if hub.local_files_only else _list_files(hub_id, hub)
    small = [file.name for file in files if file.name.endswith(_SMALL_SUFFIXES)]
    return download_files(hub_id, hub, small) if small else Path(), files


def read_remote_shapes(hub_id: str, hub: HubOptions, files: Sequence[RepositoryFile]) -> dict[str, Any]:
    """Shapes of the tensors in safetensors files of a repository, from their headers alone."""

    def read(_: Any) -> dict[str, Any]:
        from huggingface_hub import HfApi

        api, shapes = HfApi(token=hub.token), {}
        for file in files:
            header = api.parse_safetensors_file_metadata(hub_id, file.name, revision=hub.revision)
            shapes.update({name: torch.Size(tensor.shape) for name, tensor in header.tensors.items()})
        return shapes

    return cast("dict[str, Any]", _run(hub_id, read))


def download_files(hub_id: str, hub: HubOptions, patterns: Sequence[str]) -> Path:
    """Download the files of a repository that match the patterns; returns their folder."""
    return _run(
        hub_id, lambda api: Path(api.snapshot_download(hub_id, allow_patterns=list(patterns), **hub.as_arguments()))
    )


def select_weights(files: Sequence[RepositoryFile], folders: Sequence[str] = ()) -> list[RepositoryFile]:
    """The weights to download: one format of those in the root, in `folders` and in drafters, and all companions."""
    by_folder: dict[str, list[RepositoryFile]] = {}
    selected = []
    for file in files:
        if not file.name.endswith(WEIGHT_SUFFIXES):
            continue
        if file.name.startswith(f"{COMPANIONS}/"):
            selected.append(file)
        elif file.folder in ("", *folders) or fnmatch(file.folder, _DRAFTER_FOLDERS):
            by_folder.setdefault(file.folder, []).append(file)
    names = {file.name for file in files}
    for folder, candidates in by_folder.items():
        suffixes = next(s for s in _FORMATS if any(file.name.endswith(s) for file in candidates))
        prefix = f"{folder}/" if folder else ""
        # Beside an index, a file with all weights repeats what the shards hold.
        repeated = [single for single in SINGLE_FILES if f"{prefix}{single}.index.json" in names]
        selected += [f for f in candidates if f.name.endswith(suffixes) and f.base_name not in repeated]
    return selected


def _list_files(hub_id: str, hub: HubOptions) -> list[RepositoryFile]:
    """The files of a repository with their sizes; [] without a connection, so that the cache can be tried."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    def list_files(_: Any) -> list[RepositoryFile]:
        try:
            info = HfApi(token=hub.token).model_info(hub_id, revision=hub.revision, files_metadata=True)
        except OfflineModeIsEnabled:
            return []
        except connection_errors():
            return []
        return [RepositoryFile(file.rfilename, file.size or 0) for file in info.siblings or ()]

    return _run(hub_id, list_files)


def _refuse_several_models(hub_id: str, files: Sequence[RepositoryFile]) -> None:
    """Raise a ConfigError for a repository that has no config.json and several files of weights to choose from."""
    names = [file.name for file in files if not file.folder and file.name.endswith(WEIGHT_SUFFIXES)]
    if len(names) > 1 and all(file.name != "config.json" for file in files):
        raise ConfigError(
            f"{hub_id} holds several models and no config.json; give one of its files: "
            f"{', '.join(f'{hub_id}/{name}' for name in names)}."
        )


def _check_disk(hub_id: str, hub: HubOptions, files: Sequence[RepositoryFile]) -> None:
    """Say how much will be downloaded, and raise a CapacityError if the disk has no room for it."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing = [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(hub_id, file.name, hub.cache_dir, hub.revision), str)
    ]
    needed = sum(file.size for file in missing)
    cache = Path(hub.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CapacityError(
            f"{hub_id} needs {needed / _GIGABYTE:.1f} GB of downloads, but {existing} has {free / _GIGABYTE:.1f} GB "
            "free; make room, or set HF_HOME to a folder on a larger disk."
        )
    if missing:
        noun = "file" if len(missing) == 1 else "files"
        log.warning(f"downloading {needed / _GIGABYTE:.1f} GB of {hub_id} ({len(missing)} {noun}) to {cache}")


def _run(hub_id: str, action: Callable[[Any], Any]) -> Any:
    """Call `action(huggingface_hub)`; what goes wrong becomes one sentence."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    failures: tuple[type[Exception], ...] = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
    failures += connection_errors()
    try:
        return action(huggingface_hub)
    except failures as error:
        raise CheckpointError(
            f"{hub_id} could not be downloaded from the Hugging Face hub ({first_line(error)}); check the name, your "
            "token and the connection, or give a folder."
        ) from error


def connection_errors() -> tuple[type[Exception], ...]:
    """Errors of a network that cannot be reached; those of the hub's HTTP client need not be OSErrors."""
    errors: list[type[Exception]] = [ConnectionError, TimeoutError]
    for name in ("httpx", "httpx2"):  # depends on the version of huggingface_hub
        with suppress(ImportError):
            errors.append(importlib.import_module(name).TransportError)
    return tuple(errors)
