"""Repositories of the hub that are described without downloading their weights, only small files and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from underdraw.io import expand_user
from underdraw.models.checkpoint import EMBEDDED_MODELS, Checkpoint, open_checkpoint
from underdraw.models.hub import (
    HubOptions,
    RepositoryFile,
    download_small_files,
    is_hub_id,
    read_remote_shapes,
    select_weights,
)
from underdraw.models.loading import find_family


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint(Checkpoint):
    """A checkpoint whose weights are on the hub: their files, and their shapes from the files' headers."""

    remote_files: tuple[RepositoryFile, ...] = ()
    remote_shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    def shapes(self) -> dict[str, torch.Size]:
        return dict(self.remote_shapes)


def open_for_inspection(name: str, hub: HubOptions | None = None) -> Checkpoint:
    """Open a checkpoint by name; weights of the hub are not downloaded if they are safetensors with a configuration."""
    hub = hub or HubOptions()
    is_local = name in EMBEDDED_MODELS or expand_user(name).exists()
    if is_local or not is_hub_id(name) or name.count("/") > 1 or hub.local_files_only:
        return open_checkpoint(name, hub)
    folder, files = download_small_files(name, hub)
    checkpoint = Checkpoint.from_path(folder, name, hub)
    is_described = bool(checkpoint.config) or (folder / "model_index.json").exists()
    weights = select_weights(files, _folders(checkpoint) if is_described else ())
    if not is_described or not weights or not all(file.name.endswith(".safetensors") for file in weights):
        return open_checkpoint(name, hub)
    shapes = read_remote_shapes(name, hub, [file for file in weights if not file.folder])
    return RemoteCheckpoint(
        Path(folder), name, checkpoint.config, hub, remote_files=tuple(weights), remote_shapes=shapes
    )


def _folders(checkpoint: Checkpoint) -> tuple[str, ...]:
    family = find_family(checkpoint)
    return () if family is None else family.folders
