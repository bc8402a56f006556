"""Scheduler: continuous batching of images that arrive, finish and are cancelled at any time.

`add` queues the images of a request from any thread. One thread calls `step`, which admits waiting images into free
slots, runs one pass of every running image and retires those that are finished. An image never depends on what else is
running: its tokens are those of drawing it alone.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from underdraw.engine.decode import resolve_proposal
from underdraw.engine.step import TokenStatsMode
from underdraw.errors import ConfigError
from underdraw.history import History, StepResult
from underdraw.tree import Proposal

if TYPE_CHECKING:
    from underdraw.pipeline import Pipeline
    from underdraw.request import GenerationRequest

Status = Literal["waiting", "running", "finished", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class ScheduledImage:
    """One image of a request, handed back by `Scheduler.add`. Only the scheduler writes its fields."""

    request_id: str
    index: int  # of the image within the request
    request: GenerationRequest  # of this image alone
    history: History  # tokens committed so far and the passes that produced them
    status: Status = "waiting"
    error: Exception | None = None  # of a failed image
    queued_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def prompt(self) -> str:
        return self.request.prompts[0]

    @property
    def seed(self) -> int:
        return self.request.seeds[0]

    @property
    def is_done(self) -> bool:
        """Whether nothing will change any more: finished, cancelled or failed."""
        return self.status not in ("waiting", "running")

    @property
    def queued_seconds(self) -> float:
        """Seconds between `add` and the prefill, or until now."""
        return (self.started_at or self.ended_at or time.perf_counter()) - self.queued_at

    @property
    def run_seconds(self) -> float:
        """Seconds between the prefill and the end, or until now."""
        return 0.0 if self.started_at is None else (self.ended_at or time.perf_counter()) - self.started_at


@dataclass(frozen=True, slots=True)
class SchedulerStep:
    """What one call of `Scheduler.step` did."""

    results: list[tuple[ScheduledImage, StepResult]]  # of every image that ran
    finished: list[ScheduledImage]  # images that ended: finished, cancelled or failed; see their status


class Scheduler:
    """Draws the images of many requests with one pipeline, `slots` of them at once."""

    def __init__(self, pipe: Pipeline, *, slots: int = 8, token_stats: TokenStatsMode = "skip") -> None:
        if slots < 1:
            raise ConfigError(f"a scheduler of {slots} slots can draw nothing; use at least 1.")
        self.pipe, self.slots, self.token_stats = pipe, slots, token_stats
        self._lock = threading.Lock()
        self._waiting: deque[ScheduledImage] = deque()
        self._running: dict[ScheduledImage, Iterator[StepResult]] = {}
        self._cancelled: set[ScheduledImage] = set()
        self._closed = False

    def add(self, request: GenerationRequest, *, request_id: str | None = None) -> list[ScheduledImage]:
        """Queue the images of a request, first come, first served; raises ConfigError for one that cannot be drawn.

        May be called from any thread.
        """
        model, proposal = self.pipe.model, self.pipe.proposal
        resolve_proposal(self.pipe.verifier, None if proposal == "auto" else cast(Proposal, proposal))
        for text in request.prompts:
            model.check_prompt(text)
        layout, name = model.make_layout(request.size), request_id or uuid.uuid4().hex
        images = [
            ScheduledImage(name, index, request.select([index]), History(layout, seed, request.prompts[index]))
            for index, seed in enumerate(request.seeds)
        ]
        with self._lock:
            if self._closed:
                raise ConfigError("the scheduler is closed; make a new one.")
            self._waiting.extend(images)
        return images

    def cancel(self, images: Iterable[ScheduledImage]) -> None:
        """Stop drawing images before the next pass; those that have ended stay as they are. From any thread."""
        with self._lock:
            self._cancelled.update(images)

    @property
    def running(self) -> int:
        """Number of images in slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of images in the queue."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> SchedulerStep:
        """Admit waiting images into free slots, run one pass and retire images that ended."""
        ended, results = self._cancel_requested(), []
        ended += self._admit()
        for image, steps in list(self._running.items()):
            try:
                result = next(steps, None)
                if result is not None:
                    results.append((image, result))
            except Exception as error:
                ended.append(self._end(image, "failed", error))
            else:
                if image.history.done:
                    ended.append(self._end(image, "finished"))
        return SchedulerStep(results, ended)

    def close(self) -> None:
        """Cancel everything and refuse new requests."""
        with self._lock:
            self._closed = True
            self._cancelled.update(self._waiting, self._running)
        self._cancel_requested()

    def _cancel_requested(self) -> list[ScheduledImage]:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            self._waiting = deque(image for image in self._waiting if image not in cancelled)
        return [self._end(image, "cancelled") for image in cancelled if not image.is_done]

    def _admit(self) -> list[ScheduledImage]:
        """Start waiting images in free slots; returns those that failed."""
        # Captured passes of one pipeline share their buffers, so they draw one image after another.
        slots, failed = self.slots if self.pipe.graphs is None else 1, []
        while len(self._running) < slots:
            with self._lock:
                if not self._waiting:
                    break
                image = self._waiting.popleft()
            image.status, image.started_at = "running", time.perf_counter()
            try:
                self._running[image] = self.pipe.stream(image.request, [image.history], self.token_stats)
            except Exception as error:
                failed.append(self._end(image, "failed", error))
        return failed

    def _end(self, image: ScheduledImage, status: Status, error: Exception | None = None) -> ScheduledImage:
        self._running.pop(image, None)
        image.status, image.error, image.ended_at = status, error, time.perf_counter()
        return image
