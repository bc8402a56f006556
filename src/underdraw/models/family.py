"""What a family is, and what a checkpoint becomes when its family has loaded it.

A family is one file of this folder: data and a few functions. `recognise` says whether a checkpoint is one of its own,
`load` makes a `LoadedModel` of it. Nothing above this folder knows which family it is dealing with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import Checkpoint, Hub
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch
from underdraw.protocols import ImageTokenizer, Prompt


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint that its authors have published."""

    id: str
    licence: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A published drafter, and the width and picture size of the model that it was trained for."""

    id: str
    dim: int
    side: int


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a family's authors draw with it; every one of these can be overridden in a call."""

    guidance: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Height and width of a picture, in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights go, and as what."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint's configuration says of it, before any weight is read."""

    arch: Arch
    settings: SamplingDefaults
    sizes: tuple[ImageSize, ...]  # the first one is the default
    layout: Callable[[ImageSize], Layout]

    def model(
        self, family: str, checkpoint: Checkpoint, target: DecoderTarget, images: ImageTokenizer, prompt: MakePrompt
    ) -> LoadedModel:
        """The checkpoint as a model, once its parts are loaded."""
        return LoadedModel(
            family=family,
            name=checkpoint.name,
            target=target,
            images=images,
            settings=self.settings,
            sizes=self.sizes,
            layout=self.layout,
            prompt=prompt,
            drafters=checkpoint.drafters(),
            source=checkpoint.path,
            hub=checkpoint.hub,
        )


MakePrompt = Callable[[str, str | None, ImageSize], Prompt]
"""A family's way from words to the rows before the image: text, negative text for the unconditional row, size."""


def _reads_everything(_: str) -> None:
    """The check of families that cut long prompts, as their authors do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded checkpoint: everything that drawing with it takes."""

    family: str
    name: str  # what the user called it
    target: DecoderTarget
    images: ImageTokenizer
    settings: SamplingDefaults
    sizes: tuple[ImageSize, ...]  # the first one is the default
    layout: Callable[[ImageSize], Layout]
    prompt: MakePrompt
    check: Callable[[str], None] = _reads_everything  # refuses words that it cannot read, without encoding them
    drafters: Sequence[Path] = ()  # folders of the drafters that came with it, best first
    source: Path | None = field(default=None)  # the files it was loaded from
    hub: Hub = Hub()  # how to fetch what belongs to it, such as drafters

    @property
    def placement(self) -> Placement:
        weight = self.target.net.head.weight
        return Placement(weight.device, weight.dtype)

    def size(self, height: int | None, width: int | None) -> ImageSize:
        """The size that was asked for, if the family can draw it."""
        default = self.sizes[0]
        if height is None and width is None:
            return default
        given = [s for s in self.sizes if height in (None, s.height) and width in (None, s.width)]
        if not given:
            asked = f"{default.height if height is None else height}x{default.width if width is None else width}"
            raise ConfigError(
                f"{self.name} cannot draw {asked} (height x width) pixels; use {', '.join(map(str, self.sizes))}."
            )
        return given[0]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint."""

    name: str
    summary: str
    published: tuple[PublishedCheckpoint, ...]
    recognise: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, Placement], LoadedModel]
    describe: Callable[[Checkpoint], Description] | None = None
    drafters: tuple[PublishedHead, ...] = ()
