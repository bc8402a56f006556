"""Options of `underdraw generate` for many images: how they are stored, and who draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from underdraw.errors import ConfigError

SCALE = "Many images"
MAX_WORKERS = 1024

Batch = Annotated[
    int,
    typer.Option(metavar="COUNT", rich_help_panel=SCALE, help="Images of a folder that each worker draws together."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        rich_help_panel=SCALE,
        help="Draw a folder with so many processes, each with a GPU or a share of the cores.",
    ),
]
ImageFormat = Annotated[
    Literal["folder", "webdataset", "parquet"],
    typer.Option(
        "--format",
        rich_help_panel=SCALE,
        help="How a folder stores images: PNG files with metadata.jsonl, tar shards, or Parquet shards.",
    ),
]
ShardSize = Annotated[
    int, typer.Option(metavar="COUNT", rich_help_panel=SCALE, help="Images of a tar or Parquet shard.")
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="auto|ADDRESS", rich_help_panel=SCALE, help="Draw a folder on a Ray cluster; auto finds it."
    ),
]
Actors = Annotated[
    str,
    typer.Option(
        metavar="COUNT|MIN:MAX",
        rich_help_panel=SCALE,
        help="With --ray: how many actors hold the model; with MIN:MAX the pool grows and shrinks.",
    ),
]
ActorGpus = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-actor",
        metavar="NUMBER",
        rich_help_panel=SCALE,
        help="With --ray: GPUs of an actor, or a part of one. Default: 1 if the cluster has GPUs, or else 0.",
    ),
]


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """Who draws a folder: this process, local workers, or a Ray cluster."""

    workers: int | None = None
    ray: str | None = None
    actors: str = "1"
    gpus_per_actor: float | None = None

    def check(self) -> None:
        """Raise for counts out of range and options that exclude each other."""
        if self.workers is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"--workers {self.workers} is out of range; use 1 to {MAX_WORKERS}.")
        if self.workers is not None and self.ray is not None:
            raise ConfigError("--workers and --ray exclude each other; set the size of a Ray pool with --actors.")
        if self.ray is None and (self.actors != "1" or self.gpus_per_actor is not None):
            raise ConfigError("--actors and --gpus-per-actor are for Ray; add --ray auto.")
        low, high = self.pool
        if not 1 <= low <= high <= MAX_WORKERS:
            raise ConfigError(f"--actors {self.actors} is not allowed; use COUNT or MIN:MAX, from 1 to {MAX_WORKERS}.")
        if self.gpus_per_actor is not None and not 0 <= self.gpus_per_actor <= 64:
            raise ConfigError(f"--gpus-per-actor {self.gpus_per_actor:g} is out of range; use 0 to 64.")

    @property
    def pool(self) -> tuple[int, int]:
        """The smallest and largest number of Ray actors; (0, 0) for anything but numbers."""
        low, _, high = self.actors.partition(":")
        return (int(low), int(high or low)) if low.isdecimal() and (high or low).isdecimal() else (0, 0)
