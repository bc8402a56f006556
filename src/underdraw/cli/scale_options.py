"""Options of `underdraw generate` for many images: how they are stored, and who draws them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import typer

from underdraw.errors import ConfigError
from underdraw.ranges import check_number

MAX_BATCH, MAX_WORKERS, MAX_GPUS = 256, 1024, 64
WORKERS_PER_CORE = 8
RAY_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s:/]+:[0-9]{1,5}|(ray://)?\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")
scale_option = partial(typer.Option, rich_help_panel="Many images")

Batch = Annotated[
    int, scale_option(min=1, max=MAX_BATCH, metavar="COUNT", help="Images of a folder that each worker draws together.")
]
Workers = Annotated[
    int | None,
    scale_option(
        min=1,
        max=MAX_WORKERS,
        metavar="COUNT",
        help="Draw a folder with so many processes, each with a GPU or a share of the cores.",
    ),
]
ImageFormat = Annotated[
    Literal["folder", "webdataset", "parquet"],
    scale_option(help="How a folder stores images: PNG files with metadata.jsonl, tar shards, or Parquet shards."),
]
ShardSize = Annotated[int, scale_option(min=1, metavar="COUNT", help="Images of a tar or Parquet shard.")]
Ray = Annotated[
    str | None,
    scale_option("--ray", metavar="auto|ADDRESS", help="Draw a folder on a Ray cluster; auto finds it."),
]
Actors = Annotated[
    str,
    scale_option(
        metavar="COUNT|MIN:MAX",
        help="With --ray: how many actors hold the model; with MIN:MAX the pool grows and shrinks.",
    ),
]
ActorGpus = Annotated[
    float | None,
    scale_option(
        metavar="NUMBER",
        help="With --ray: GPUs of an actor, or a part of one. Default: 1 if the cluster has GPUs, or else 0.",
    ),
]


@dataclass(frozen=True)
class ScaleOptions:
    """How a folder is stored, and who draws it: this process, local workers, or a Ray cluster."""

    batch: Batch = 1
    workers: Workers = None
    format: ImageFormat = "folder"
    shard_size: ShardSize = 1000
    ray: Ray = None
    actors: Actors = "1"
    gpus_per_actor: ActorGpus = None

    def check_scale(self) -> None:
        """Raise for options that exclude each other, and for a pool of actors that is none."""
        most = WORKERS_PER_CORE * (os.cpu_count() or 1)
        if self.workers is not None and self.workers > most:
            raise ConfigError(f"--workers {self.workers} is too much for this machine's cores; use at most {most}.")
        if self.workers is not None and self.ray is not None:
            raise ConfigError("--workers and --ray exclude each other; set the size of a Ray pool with --actors.")
        if self.ray is not None and not RAY_ADDRESS.fullmatch(self.ray):
            raise ConfigError(f"--ray {self.ray!r} is no address of a Ray cluster; use auto, or HOST:PORT.")
        if self.ray is None and (self.actors != "1" or self.gpus_per_actor is not None):
            raise ConfigError("--actors and --gpus-per-actor are for Ray; add --ray auto.")
        low, high = self.pool
        if not 1 <= low <= high <= MAX_WORKERS:
            raise ConfigError(f"--actors {self.actors} is not allowed; use COUNT or MIN:MAX, from 1 to {MAX_WORKERS}.")
        check_number("--gpus-per-actor", self.gpus_per_actor, 0, MAX_GPUS)

    @property
    def pool(self) -> tuple[int, int]:
        """The smallest and largest number of Ray actors; (0, 0) for anything but numbers."""
        low, _, high = self.actors.partition(":")
        return (int(low), int(high or low)) if low.isdecimal() and (high or low).isdecimal() else (0, 0)
