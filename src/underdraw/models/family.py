"""The interface between a model family and the rest of the package. Code above this folder never names a family.

To add a family, write one module with four things:

1. `matches(checkpoint) -> bool`: whether the checkpoint belongs to the family, from its config.json or, if it has none,
   its tensor names. Before a download, only the JSON files of a repository exist.
2. `read_spec(checkpoint) -> ModelSpec`: decoder architecture, image sizes, token layout and sampling defaults, from
   the configuration alone.
3. `load(checkpoint, placement) -> LoadedModel`: load the decoder by `weight_map.load_decoder` with rules that name its
   tensors, and build the image tokenizer and the function that turns text into prompt tokens.
4. `FAMILY = Family(...)`: a name, a summary, the published checkpoints, and the three functions.

Then register `FAMILY` under the entry point group `underdraw.family` of your package (or in `registry.families`).
docs/models.md has a complete example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import SAVED_CHOICES_FILE, Checkpoint
from underdraw.models.config import (
    ImageSize,
    Placement,
    PublishedCheckpoint,
    PublishedDrafter,
    SamplingDefaults,
    SizeRange,
)
from underdraw.models.hub import HubOptions
from underdraw.models.vocabulary import Vocabulary
from underdraw.nn.quantization import weight_format_of
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch
from underdraw.protocols import ImageTokenizer, Prompt

__all__ = [  # with the values in `config`: all that describes a family can be imported from here
    "Family",
    "ImageSize",
    "LoadedModel",
    "MakePrompt",
    "ModelSpec",
    "Placement",
    "PublishedCheckpoint",
    "PublishedDrafter",
    "SamplingDefaults",
    "SizeRange",
]
log = logging.getLogger(__name__)

_MAX_LISTED = 24  # sizes that an error message lists before it counts the rest


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a checkpoint's configuration says about the model; no weights are read for it."""

    arch: Arch
    defaults: SamplingDefaults
    sizes: tuple[ImageSize, ...]  # the first is the default
    make_layout: Callable[[ImageSize], Layout]
    requires_size: bool = False  # its files do not include the image size that it was trained for
    size_range: SizeRange | None = None  # further sizes; `sizes` are then the usual ones
    max_positions: int | None = None  # tokens of the longest sequence; None means no limit

    def resolve_size(self, name: str, height: int | None, width: int | None) -> ImageSize:
        """As that of the loaded model, whose name is `name`."""
        return _resolve_size(self, name, height, width)

    def build(
        self,
        family: str,
        checkpoint: Checkpoint,
        target: DecoderTarget,
        image_tokenizer: ImageTokenizer,
        make_prompt: MakePrompt,
    ) -> LoadedModel:
        """Combine the spec with the loaded parts."""
        return LoadedModel(
            family=family,
            name=checkpoint.name,
            target=target,
            image_tokenizer=image_tokenizer,
            defaults=self.defaults,
            sizes=self.sizes,
            make_layout=self.make_layout,
            make_prompt=make_prompt,
            size_range=self.size_range,
            drafter_folders=checkpoint.drafter_folders(),
            path=checkpoint.path,
            hub=checkpoint.hub,
            checkpoint=checkpoint,
            requires_size=self.requires_size,
        )


MakePrompt = Callable[[str, str | None, ImageSize], Prompt]
"""(text, negative text or None, image size) -> the tokens or features before the image, for both guidance rows."""


def _accept_any_prompt(_: str) -> None:
    """The default `check_prompt`: most families truncate long prompts, as their authors do."""


def _need_no_package() -> None:
    """The default `check_pixels`: most families decode pixels by themselves."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded checkpoint: everything the pipeline needs to generate images with it."""

    family: str
    name: str  # as the user gave it
    target: DecoderTarget
    image_tokenizer: ImageTokenizer
    defaults: SamplingDefaults
    sizes: tuple[ImageSize, ...]  # the first is the default
    make_layout: Callable[[ImageSize], Layout]
    make_prompt: MakePrompt
    size_range: SizeRange | None = None  # further sizes; `sizes` are then the usual ones
    check_prompt: Callable[[str], None] = _accept_any_prompt  # raises ConfigError, without running a text encoder
    drafter_folders: Sequence[Path] = ()  # drafters shipped with the checkpoint, the preferred one first
    path: Path | None = None  # file or folder it was loaded from
    hub: HubOptions = HubOptions()  # used to download drafters
    checkpoint: Checkpoint | None = None  # with the companions that saved copies include
    requires_size: bool = False  # there is no default size: a call must give height and width
    vocabulary: Vocabulary | None = None  # the words of its training captions, where they are few and listed

    @property
    def placement(self) -> Placement:
        weight = self.target.net.embedding.weight
        return Placement(weight.device, weight.dtype, weight_format_of(self.target.net))

    def unknown_words(self, texts: Iterable[str]) -> list[str]:
        """The words that the model was not trained with; empty for models that read any text."""
        return [] if self.vocabulary is None else self.vocabulary.unknown_words(texts)

    def warn_unknown_words(self, prompts: Iterable[str]) -> None:
        """Log a warning with the words of the prompts that the model was not trained with, if there are any."""
        words = self.unknown_words(prompts)
        if self.vocabulary is not None and words:
            names = ", ".join(map(repr, words[:8])) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
            noun = "word" if len(words) == 1 else "words"
            similar = ", ".join(map(repr, self.vocabulary.similar_words(words[:8])))
            log.warning(
                f"{self.name} was not trained with the {noun} {names} and draws something else instead"
                f"{f' (it knows {similar})' if similar else ''}; "
                f"`underdraw models {self.name} --words` lists all that it knows."
            )

    def resolve_size(self, height: int | None, width: int | None) -> ImageSize:
        """Return the first supported size with this height and width, where None means any."""
        return _resolve_size(self, self.name, height, width)


def _resolve_size(model: ModelSpec | LoadedModel, name: str, height: int | None, width: int | None) -> ImageSize:
    default = model.sizes[0]
    if model.requires_size and (height is None or width is None):
        squares = ", ".join(str(size) for size in model.sizes if size.height == size.width)
        raise ConfigError(
            f"the files of {name} do not say which image size it was trained for; give height and width, for "
            f"example one of {squares}, or write a file {SAVED_CHOICES_FILE} into its folder that says "
            f'{{"size": "{default}"}}.'
        )
    if height is None and width is None:
        return default
    requested = ImageSize(default.height if height is None else height, default.width if width is None else width)
    candidates = [size for size in model.sizes if height in (None, size.height) and width in (None, size.width)]
    if model.size_range is not None and requested in model.size_range:
        candidates.append(requested)
    if not candidates:
        squares_first = sorted(model.sizes, key=lambda size: size.height != size.width)
        names, others = [str(size) for size in squares_first], ""
        if len(names) > _MAX_LISTED:
            others = f" or one of {len(names) - _MAX_LISTED} more"
        if model.size_range is not None:
            others += f", or any {model.size_range}"
        raise ConfigError(
            f"{name} cannot generate {requested} (height x width) pixels; use {', '.join(names[:_MAX_LISTED])}{others}."
        )
    return candidates[0]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of checkpoint, and how to load it."""

    name: str
    summary: str  # one line for `underdraw models`
    published: tuple[PublishedCheckpoint, ...]
    matches: Callable[[Checkpoint], bool]
    load: Callable[[Checkpoint, Placement], LoadedModel]
    read_spec: Callable[[Checkpoint], ModelSpec] | None = None  # None: the model is small, load it to inspect it
    drafters: tuple[PublishedDrafter, ...] = ()
    folders: tuple[str, ...] = ()  # subfolders of a hub repository whose weights are needed
    pixel_folders: tuple[str, ...] = ()  # further ones, which only turn codes into pixels
    load_text: Callable[[Checkpoint], object] | None = None  # its text tokenizer, tried before a download
    check_pixels: Callable[[], None] = _need_no_package  # raises if a package that does so is not installed
    extra: str = "families"  # underdraw's extra with all packages that it needs

    @property
    def all_folders(self) -> tuple[str, ...]:
        return (*self.folders, *self.pixel_folders)
