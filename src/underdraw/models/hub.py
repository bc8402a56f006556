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
from underdraw.models.progress_bars import library_progress_bars

log = logging.getLogger(__name__)

COMPANIONS = "companions"  # subfolder of saved models with the files that their authors publish elsewhere
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Formats of weights, the preferred one first: a folder that has several of them holds the same weights twice.
_FORMATS = ((".safetensors",), (".bin",), (".pt", ".pth", ".ckpt"))
IMAGE_TOKENIZER_FILES = "vq_*"  # LlamaGen's authors publish image tokenizers next to the models
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")  # all weights in one file; shards have an index
_SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".yaml", ".model", ".tiktoken")
DRAFTER_FOLDERS = "drafter*"
_UNAVAILABLE = (429, 500, 502, 503, 504)  # HTTP status of a hub that is busy or down
_GIGABYTE, _MEGABYTE = 1e9, 1e6


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
    def is_companion(self) -> bool:
        """Whether a saved model needs it, whatever its suffix is."""
        return self.name.startswith(f"{COMPANIONS}/")

    @property
    def base_name(self) -> str:
        return self.name.rpartition("/")[2]


CheckFolder = Callable[[Path, Sequence[RepositoryFile]], Sequence[str]]
"""(folder of the small files, all files) -> the subfolders whose weights are needed; an error if they are of no use."""


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
        return _download_file(f"{owner}/{repository}", file[0], hub)
    folder, files = download_small_files(hub_id, hub)
    if not files:
        # Offline: what the cache has. Patterns would not do: the hub refuses a snapshot that lacks a matching file, and
        # of weights that are there twice only one set was downloaded.
        return download_files(hub_id, hub, [])
    _refuse_several_models(hub_id, files)
    weights = select_weights(files, check(folder, files) if check and folder is not None else ())
    _announce_download(hub_id, hub, weights)
    small = [f for f in files if f.name.endswith(_SMALL_SUFFIXES)]
    return download_files(hub_id, hub, [f.name for f in (*small, *weights)])


def _download_file(repository: str, name: str, hub: HubOptions) -> Path:
    """Download one file of a repository."""
    files = [] if hub.local_files_only else _list_files(repository, hub)
    if files and all(file.name != name for file in files):
        weights = [file.name for file in files if file.name.endswith(WEIGHT_SUFFIXES)]
        raise CheckpointError(f"{repository} has no file {name} but {', '.join(weights) or 'no weights at all'}.")
    _announce_download(repository, hub, [file for file in files if file.name == name])
    arguments = hub.as_arguments()
    return _run(f"{repository}/{name}", lambda api: Path(api.hf_hub_download(repository, name, **arguments)))


def download_small_files(hub_id: str, hub: HubOptions) -> tuple[Path | None, list[RepositoryFile]]:
    """Download the configuration and text files of a repository; returns their folder and all files, [] if offline.

    The folder is None if there are no such files.
    """
    files = [] if hub.local_files_only else _list_files(hub_id, hub)
    small = [file.name for file in files if file.name.endswith(_SMALL_SUFFIXES)]
    return download_files(hub_id, hub, small) if small else None, files


def check_repository(hub_id: str, hub: HubOptions) -> None:
    """Raise a CheckpointError if the hub has no repository of this name; nothing is known if it cannot be reached."""
    if not hub.local_files_only:
        _list_files("/".join(hub_id.split("/")[:2]), hub)


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
        if file.is_companion:
            selected.append(file)
        elif file.name.endswith(WEIGHT_SUFFIXES) and (
            file.folder in ("", *folders) or fnmatch(file.folder, DRAFTER_FOLDERS)
        ):
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
    """The files of a repository with their sizes; [] if the hub cannot be reached, so that the cache can be tried."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    unreachable: tuple[type[Exception], ...] = (OfflineModeIsEnabled, *connection_errors())

    def list_files(_: Any) -> list[RepositoryFile]:
        try:
            info = HfApi(token=hub.token).model_info(hub_id, revision=hub.revision, files_metadata=True)
        except unreachable:
            return []
        except HfHubHTTPError as error:
            if error.response is not None and error.response.status_code in _UNAVAILABLE:
                return []
            raise
        return [RepositoryFile(file.rfilename, file.size or 0) for file in info.siblings or ()]

    return _run(hub_id, list_files)


def _refuse_several_models(hub_id: str, files: Sequence[RepositoryFile]) -> None:
    """Raise a ConfigError for a repository that has no config.json and several files of weights to choose from."""
    weights = [file.name for file in files if not file.folder and file.name.endswith(WEIGHT_SUFFIXES)]
    names = [name for name in weights if not fnmatch(name, IMAGE_TOKENIZER_FILES)]
    if len(names) > 1 and all(file.name != "config.json" for file in files):
        raise ConfigError(
            f"{hub_id} holds several models and no config.json; give one of its files: "
            f"{', '.join(f'{hub_id}/{name}' for name in names)}."
        )


def missing_files(hub_id: str, hub: HubOptions, files: Sequence[RepositoryFile]) -> list[RepositoryFile]:
    """Those that the hub's cache does not hold."""
    from huggingface_hub import try_to_load_from_cache

    return [
        file
        for file in files
        if not isinstance(try_to_load_from_cache(hub_id, file.name, hub.cache_dir, hub.revision), str)
    ]


def _announce_download(hub_id: str, hub: HubOptions, files: Sequence[RepositoryFile]) -> None:
    """Say how much will be downloaded, and raise a CapacityError if the disk has no room for it."""
    from huggingface_hub import constants

    missing = missing_files(hub_id, hub, files)
    needed = sum(file.size for file in missing)
    cache = Path(hub.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CapacityError(
            f"{hub_id} needs {format_size(needed)} of downloads, but {existing} has {format_size(free)} free; make "
            "room, or set HF_HOME to a folder on a larger disk."
        )
    if missing:
        what = missing[0].name if len(missing) == 1 else f"{len(missing)} files"
        log.warning(f"downloading {format_size(needed)} of {hub_id} ({what}) to {cache}")


def format_size(count: int) -> str:
    """A number of bytes for people: "14.0 GB"."""
    return f"{count / _GIGABYTE:.1f} GB" if count >= _GIGABYTE / 10 else f"{count / _MEGABYTE:.1f} MB"


def _run(hub_id: str, action: Callable[[Any], Any]) -> Any:
    """Call `action(huggingface_hub)`; what goes wrong becomes one sentence."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    failures: tuple[type[Exception], ...] = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
    failures += connection_errors()
    try:
        with library_progress_bars():
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
