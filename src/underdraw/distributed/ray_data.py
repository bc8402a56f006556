"""Workers on a Ray cluster: Ray Data runs a pool of actors, each with a pipeline, and replaces those it loses.

The driver reads prompts by the window and stores what comes back, as with other workers. So a lost actor or node costs
the images that it was drawing, a lost driver those that it had not stored yet.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from underdraw.distributed.drawer import RunDrawer, pack_image, unpack_event
from underdraw.distributed.planned_images import (
    DrawnImage,
    Event,
    ModelInfo,
    PlannedImage,
    Progress,
    PromptCheck,
    WorkerOptions,
)
from underdraw.errors import ConfigError
from underdraw.extras import require_package

RETRIES = "2"  # of a connection to the cluster, of 40 s each; Ray's default takes a quarter of an hour
CONNECT_SECONDS = 10.0
WINDOW = 50_000  # images of one execution of Ray Data; the prompts of later ones are not read yet
BATCHES = 4  # images of a call of an actor, per slot: the slots stay filled until the last few


class RayActors:
    """Draws on a Ray cluster."""

    def __init__(self, options: WorkerOptions, address: str, pool: tuple[int, int], gpus: float | None = None) -> None:
        """`address` is "auto" or that of the cluster; `pool` the smallest and largest number of actors."""
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", RETRIES)  # read when ray is imported
        self._ray = require_package("ray", "ray", "--ray")
        require_package("ray.data", "ray", "--ray")
        self._options, self._pool = options, pool
        if not self._ray.is_initialized():
            try:
                _check_reachable(address)
                self._ray.init(address=address, log_to_driver=not options.quiet, logging_level="ERROR")
            except (OSError, ValueError, RuntimeError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"there is no Ray cluster at {address} ({reason}); start one with ray start."
                ) from None
        resources = self._ray.cluster_resources()
        self._gpus = float(resources.get("GPU", 0) > 0) if gpus is None else gpus
        self._first: Any = None

    def start(self) -> ModelInfo:
        actor = self._ray.remote(RunDrawer).options(num_gpus=self._gpus, num_cpus=1)
        self._first = actor.remote(self._options)
        info: ModelInfo = self._ray.get(self._first.describe.remote())
        return info

    def check(self, prompts: list[str]) -> PromptCheck:
        answer: PromptCheck = self._ray.get(self._first.check.remote(prompts))
        return answer

    def draw(self, images: Iterable[PlannedImage], tree: str) -> Iterator[Event]:
        self._stop_first()  # its GPU is for the pool
        waiting = iter(images)
        while window := list(itertools.islice(waiting, WINDOW)):
            yield from self._draw_window(window, tree)

    def _draw_window(self, images: list[PlannedImage], tree: str) -> Iterator[Event]:
        """Draw some images with a pool of actors."""
        arrow: Any = require_package("pyarrow", "ray", "--ray")
        data: Any = require_package("ray.data", "ray", "--ray")
        batch, (low, high) = BATCHES * self._options.slots, self._pool
        starts = range(0, len(images), batch)
        tables = (arrow.Table.from_pylist(list(map(pack_image, images[start : start + batch]))) for start in starts)
        context = data.DataContext.get_current()
        context.enable_progress_bars = False  # the command has one
        context.execution_options.preserve_order = False
        dataset = data.from_arrow_refs([self._ray.put(table) for table in tables]).map_batches(
            RunDrawer,
            fn_constructor_args=(self._options, tree),
            batch_size=None,  # whole blocks
            compute=data.ActorPoolStrategy(min_size=low, max_size=high),
            num_gpus=self._gpus,
            num_cpus=1,
        )
        for row in dataset.iter_rows():
            event = unpack_event(row)
            if isinstance(event, DrawnImage):
                yield Progress(event.record["tokens"], event.record["passes"])
            yield event

    def _stop_first(self) -> None:
        if self._first is not None:
            self._ray.kill(self._first)
            self._first = None

    def close(self) -> None:
        self._stop_first()


def _check_reachable(address: str) -> None:
    """Raise an OSError unless something listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
