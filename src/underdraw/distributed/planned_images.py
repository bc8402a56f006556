"""The images of a run before they are drawn, and what workers say about them. No torch.

The seed of an image follows from the seed of the run, the id of its prompt and its repeat alone. So an image does not
depend on the number of workers, on the order of the prompts, on other prompts or on when it is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from underdraw.prompts import PromptRow
from underdraw.shards import EXTRA_COLUMN, KINDS

SEED_BITS = 62
REPEAT_STRIDE = 2**32  # between the seeds of a numbered prompt's images: more than any file has lines


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """One image of a run. Its index counts all images, those of refused prompts included."""

    index: int
    id: str  # of its prompt
    repeat: int  # which image of its prompt
    prompt: str
    seed: int
    columns: Mapping[str, Any] = field(default_factory=dict)  # further columns of the prompt file


@dataclass(frozen=True, slots=True)
class DrawnImage:
    """A finished image."""

    image: PlannedImage
    png: bytes
    record: dict[str, Any]  # passes, tokens per pass, codes: the same in every run
    timing: dict[str, Any]  # seconds: different in every run


@dataclass(frozen=True, slots=True)
class FailedImage:
    """An image that could not be drawn; `is_permanent` if its prompt is the reason, so that trying again is no use."""

    image: PlannedImage
    reason: str
    is_permanent: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens and passes since the last report."""

    tokens: int
    passes: int


Event = DrawnImage | FailedImage | Progress


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model says about itself, for records: the same from every worker."""

    name: str
    revision: str | None
    settings: dict[str, Any]  # `Pipeline.settings`
    versions: dict[str, str]
    tree: str  # specification of the tree policy that `auto` resolves to
    tokens: int  # of an image, drawn by target passes


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How every worker loads the model and draws. Plain values, sent to other processes and machines."""

    pipeline: Mapping[str, Any]  # arguments of `Pipeline.from_pretrained`
    request: Mapping[str, Any]  # arguments of `Pipeline.request` that all images share
    slots: int = 8  # images drawn together
    compare: bool = False  # whether to draw each image by plain decoding too
    quiet: bool = False  # whether to log errors alone
    silent: bool = False  # whether libraries show no progress bars while the model is loaded


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """What a model says about some prompts."""

    reasons: list[str | None]  # why it cannot read a prompt, None where it can
    unknown_words: list[str]  # that it was not trained with


class Workers(Protocol):
    """Whoever draws: this process, others on this machine, or a Ray cluster."""

    def start(self) -> ModelInfo:
        """Load the model."""
        ...

    def check(self, prompts: list[str]) -> PromptCheck:
        """Whether the model can read the prompts."""
        ...

    def draw(self, images: Iterable[PlannedImage], tree: str) -> Iterator[Event]:
        """Draw images in any order; `images` is read as far as there are free slots."""
        ...

    def close(self) -> None: ...


def image_seed(run_seed: int, prompt_id: str, repeat: int) -> int:
    """The seed of an image of a run: a hash, so that neighbouring ids and repeats share no noise."""
    text = f"{run_seed}\n{repeat}\n{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % 2**SEED_BITS


def row_seed(run_seed: int, row: PromptRow, repeat: int) -> int:
    """The seed of an image of a prompt: by its own seed, by its number as in a call with a list, or by its id."""
    if row.seed is not None:
        return (row.seed + repeat) % 2**SEED_BITS
    if row.is_numbered:
        return (run_seed + int(row.id) + repeat * REPEAT_STRIDE) % 2**SEED_BITS
    return image_seed(run_seed, row.id, repeat)


def plan_images(rows: Iterable[PromptRow], repeats: int, run_seed: int) -> Iterator[PlannedImage]:
    """`repeats` images of each prompt."""
    for number, row in enumerate(rows):
        for repeat in range(repeats):
            seed = row_seed(run_seed, row, repeat)
            yield PlannedImage(number * repeats + repeat, row.id, repeat, row.prompt, seed, row.columns)


def make_row(drawn: DrawnImage, info: ModelInfo) -> dict[str, Any]:
    """The row that describes an image in every format. Columns of the prompt file that have our names get a prefix."""
    image = drawn.image
    row: dict[str, Any] = {
        "index": image.index,
        "id": image.id,
        "repeat": image.repeat,
        "prompt": image.prompt,
        "seed": image.seed,
        "model": info.name,
        "revision": info.revision,
        "settings": info.settings,
        "versions": info.versions,
        **drawn.record,
    }
    return {**row, **output_columns(image.columns)}


RESERVED = frozenset(("image", "file_name", EXTRA_COLUMN, *KINDS))  # columns of the output


def output_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The further columns of a prompt file under the names that they have in the output."""
    return {f"input_{name}" if name in RESERVED else name: value for name, value in columns.items()}
