"""Checkpoints whose weights are on the hub: small files are here, shapes are read from headers of safetensors files."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from underdraw.errors import CheckpointError
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.hub import RepositoryFile, read_remote_shapes


class UnknownShapesError(CheckpointError):
    """The shapes of a repository's tensors cannot be read without downloading its weights."""


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint(Checkpoint):
    """A checkpoint of which only the small files were downloaded; `remote_files` are its weights on the hub."""

    remote_files: tuple[RepositoryFile, ...] = ()
    known_shapes: dict[str, torch.Size] = field(default_factory=dict, compare=False)  # read once, if they are needed

    @property
    def has_headers(self) -> bool:
        """Whether all weights are safetensors files."""
        return bool(self.remote_files) and all(file.name.endswith(".safetensors") for file in self.remote_files)

    def shapes(self) -> dict[str, torch.Size]:
        if not self.has_headers:
            raise UnknownShapesError(f"the tensors of {self.name} are not known before its weights are downloaded.")
        if not self.known_shapes:
            try:
                in_root = [file for file in self.remote_files if not file.folder]
                self.known_shapes.update(read_remote_shapes(self.name, self.hub, in_root))
            except CheckpointError as error:
                raise UnknownShapesError(str(error)) from error
        return dict(self.known_shapes)
