"""Scheduler: continuous batching of images that arrive, finish and are cancelled at any time.

`add` queues the images of a request from any thread. One thread calls `step`, which admits waiting images into free
slots, runs one pass of every running image and retires those that are finished. An image never depends on what else is
running: its tokens are those of drawing it alone.

An exception inside a pass concerns all images of the batch. They are restarted one after another from their committed
tokens, each with a pass of its own; only those that fail alone are failed. If none does, fewer run together afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from underdraw.engine.decode import check_histories
from underdraw.engine.slot_batch import BatchImage, BatchKey, SlotBatch
from underdraw.engine.slot_sampler import SamplingParams
from underdraw.engine.step import TokenStatsMode
from underdraw.errors import CapacityError, ConfigError
from underdraw.history import History, StepResult

if TYPE_CHECKING:
    from underdraw.pipeline import Pipeline
    from underdraw.request import GenerationRequest

log = logging.getLogger(__name__)
Status = Literal["waiting", "running", "finished", "cancelled", "failed"]
_MAX_PREFILL = 8  # images that are prefilled between two passes while others run
# Prefill of one image takes about as long as of a few, and all running ones wait for it. So newcomers wait for a slot
# in this many to be free, but not for long: an idle slot costs more than it saves in the end.
_SLOTS_PER_NEWCOMER = 8
_PATIENCE = 16  # passes


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
    """Draws the images of many requests with one pipeline, at most `slots` of them at once.

    The drafter, tree and verifier are those that the pipeline has when the scheduler is made.
    """

    def __init__(self, pipe: Pipeline, *, slots: int = 8, token_stats: TokenStatsMode = "skip") -> None:
        if not isinstance(slots, int) or slots < 1:
            raise ConfigError(
                f"slots {slots!r} must be a whole number of at least 1: how many images are drawn at once."
            )
        self.pipe, self.slots, self.token_stats = pipe, slots, token_stats
        self._parts = pipe.batch_parts(token_stats)
        self._lock = threading.Lock()
        self._waiting: deque[ScheduledImage] = deque()
        self._running: dict[BatchImage, ScheduledImage] = {}
        self._batches: dict[BatchKey, SlotBatch] = {}
        self._restarting: dict[BatchImage, BatchKey] = {}  # running images whose batch crashed, in order
        self._max_slots: dict[BatchKey, int] = {}  # of batches that crashed with more
        self._cancelled: set[ScheduledImage] = set()
        self._deferred = 0  # passes for which newcomers have waited although there is a slot
        self._closed = False

    def add(
        self,
        request: GenerationRequest,
        *,
        request_id: str | None = None,
        histories: Sequence[History] | None = None,
    ) -> list[ScheduledImage]:
        """Queue the images of a request, first come, first served; raises ConfigError for one that cannot be drawn.

        Tokens are recorded in `histories`, one per image, which the caller may pass in. May be called from any thread.
        """
        model = self.pipe.model
        if not hasattr(request, "select"):  # an output of the pipeline has prompts as well
            raise ConfigError(f"add() takes a request, not {request!r}; make one with pipe.request(PROMPT, seed=0).")
        for text in request.prompts:
            model.check_prompt(text)
        layout, name = model.make_layout(request.size), request_id or uuid.uuid4().hex
        if histories is None:
            histories = [History(layout, prompt=text) for text in request.prompts]
        check_histories(histories, len(request.prompts), layout)
        for history, seed in zip(histories, request.seeds, strict=True):
            history.seed = seed
        images = [
            ScheduledImage(name, index, request.select([index]), history) for index, history in enumerate(histories)
        ]
        with self._lock:
            if self._closed:
                raise ConfigError("the scheduler is closed; make a new one.")
            self._waiting.extend(images)
        return images

    def cancel(self, images: Iterable[ScheduledImage]) -> None:
        """Stop drawing images before the next pass; those that have ended stay as they are. From any thread."""
        listed = list(images) if isinstance(images, Iterable) else None
        if listed is None or not all(isinstance(image, ScheduledImage) for image in listed):
            raise ConfigError(f"cancel() takes the images that add() returned, not {images!r}.")
        with self._lock:
            self._cancelled.update(listed)

    @property
    def running(self) -> int:
        """Number of images in slots, or about to be restarted in one."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of images in the queue."""
        return len(self._waiting)

    def count_ahead(self, image: ScheduledImage) -> int:
        """How many images must end before a waiting one gets a slot; 0 for one that waits no more."""
        with self._lock:
            if image not in self._waiting:
                return 0
            return max(0, self.running + self._waiting.index(image) - self.slots + 1)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> SchedulerStep:
        """Admit waiting images into free slots, run one pass and retire images that ended.

        Images with and without guidance, or with and without noise, are in different batches, and so are images of
        different sizes whose drafter cannot mix them: then every batch runs one pass.
        """
        ended = self._cancel_requested()
        results: list[tuple[ScheduledImage, StepResult]] = []
        self._restart_next(results, ended)
        ended += self._admit()
        for key, batch in list(self._batches.items()):
            if not batch.running:
                continue
            members = [image for image in batch.slots if image is not None]
            try:
                step_results, failures = batch.step()
            except Exception as error:
                ended += self._crash(key, members, error)
                continue
            for image, result in step_results:
                results.append((self._running[image], result))
                if image.history.done:
                    ended.append(self._end(self._running[image], "finished"))
            ended += [self._end(self._running[image], "failed", error) for image, error in failures]
        return SchedulerStep(results, ended)

    def _crash(self, key: BatchKey, images: Sequence[BatchImage], error: Exception) -> list[ScheduledImage]:
        """Drop a batch whose pass raised, and restart its images; returns those that fail now."""
        del self._batches[key]
        if len(images) == 1 and images[0].is_stuck:
            self._explain(key, error)
            return [self._end(self._running[images[0]], "failed", error)]
        if any(image.is_stuck for image in images) or _is_out_of_memory(error):
            self._max_slots[key] = -(-len(images) // 2)
        log.warning(
            "a pass failed (%s: %s); restarting each of its images (%d) from its tokens, at most %d together.",
            type(error).__name__, error, len(images), self._max_slots.get(key, self.slots),
        )  # fmt: skip
        for image in images:
            image.restarted_at = image.history.passes
            self._restarting[image] = key
        return []

    def _restart_next(self, results: list[tuple[ScheduledImage, StepResult]], ended: list[ScheduledImage]) -> None:
        """Bring back one image of a crashed batch; running images wait for one replay at most."""
        waiting = ((image, key, self._batch(key)) for image, key in self._restarting.items())
        image, key, batch = next(((i, k, b) for i, k, b in waiting if b.free), (None, None, None))
        if image is None or key is None or batch is None:
            return
        scheduled = self._running[image]
        try:
            results.append((scheduled, batch.restart(image)))
        except Exception as error:
            if _is_out_of_memory(error) and batch.running:  # wait until one of them has ended
                self._max_slots[key] = batch.max_slots = batch.running
                return
            del self._restarting[image]
            self._explain(key, error)
            ended.append(self._end(scheduled, "failed", error))
            return
        if image.history.done:
            del self._restarting[image]
            ended.append(self._end(scheduled, "finished"))
        elif image in batch.slots:
            del self._restarting[image]

    def _explain(self, key: BatchKey, error: Exception) -> None:
        """An image failed alone, which explains why its batch crashed: the others may run together again."""
        if not _is_out_of_memory(error):
            self._max_slots.pop(key, None)
            self._batch(key).max_slots = self.slots

    def close(self) -> None:
        """Cancel everything, free the memory and refuse new requests."""
        with self._lock:
            self._closed = True
            self._cancelled.update(self._waiting, self._running.values())
        self._cancel_requested()
        self._batches.clear()

    def _cancel_requested(self) -> list[ScheduledImage]:
        """End the images that were cancelled since the last step."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            if cancelled:
                self._waiting = deque(image for image in self._waiting if image not in cancelled)
        for batch in self._batches.values() if cancelled else ():
            batch.remove([image for image in batch.slots if image and self._running[image] in cancelled])
        for image in [image for image in self._restarting if self._running[image] in cancelled]:
            del self._restarting[image]
        return [self._end(image, "cancelled") for image in cancelled if not image.is_done]

    def _admit(self) -> list[ScheduledImage]:
        """Start waiting images in free slots, in order; returns those that ended already."""
        ended: list[ScheduledImage] = []
        budget = _MAX_PREFILL if self._running else self.slots
        while budget > 0:
            batch, images = self._take(budget)
            if batch is None or not images:
                break
            budget -= len(images)
            started, tokenized = time.perf_counter(), []
            for image in images:
                image.started_at = started
                try:
                    tokenized.append((image, self._tokenize(image)))
                except Exception as error:
                    ended.append(self._end(image, "failed", error))
            ended += self._start(batch, tokenized)
        return ended

    def _take(self, most: int) -> tuple[SlotBatch | None, list[ScheduledImage]]:
        """Take the first images off the queue that belong to one batch, as many as find a slot there, and the batch."""
        with self._lock:
            if not self._waiting:
                return None, []
            key = self._key(self._waiting[0])
            layout = self._waiting[0].history.layout  # images of one size are prefilled together
            if key in self._restarting.values():  # their slots
                return None, []
            batch = self._batch(key)
            images: list[ScheduledImage] = []
            room = min(most, batch.free, self.slots - len(self._running))
            if self._should_defer(room):
                return None, []
            while self._waiting and len(images) < room:
                first = self._waiting[0]
                if first.history.layout != layout or self._key(first) != key:
                    break
                images.append(self._waiting.popleft())
            return batch, images

    def _should_defer(self, room: int) -> bool:
        """Whether waiting images should wait for more than `room` slots."""
        group = min(self.slots // _SLOTS_PER_NEWCOMER, len(self._waiting))
        is_deferred = 0 < room < group and bool(self._running) and self._deferred < _PATIENCE
        if room > 0:
            self._deferred = self._deferred + 1 if is_deferred else 0
        return is_deferred

    def _key(self, image: ScheduledImage) -> BatchKey:
        request = image.request
        layout, is_greedy = image.history.layout, request.temperature == 0
        return self._parts.key(layout, is_guided=request.guidance != 1, is_greedy=is_greedy)

    def _batch(self, key: BatchKey) -> SlotBatch:
        """The batch of a key, a new one if need be."""
        if key not in self._batches:
            slots = self._max_slots.get(key, self.slots)
            self._batches[key] = SlotBatch(self._parts, key, slots, self._free_idle_batches)
        return self._batches[key]

    def _tokenize(self, image: ScheduledImage) -> BatchImage:
        request = image.request
        params = SamplingParams(image.seed, request.temperature, request.top_k, request.top_p)
        return BatchImage(self.pipe.prompts(request)[0], params, request.guidance, image.history, image.index)

    def _start(self, batch: SlotBatch, images: list[tuple[ScheduledImage, BatchImage]]) -> list[ScheduledImage]:
        """Admit images to a batch; those without a slot go back to the queue. Returns those that ended already."""
        if not images:
            return []
        try:
            count = batch.admit([image for _, image in images])
        except Exception as error:
            if len(images) > 1:  # find out whose error it is
                return [ended for image in images for ended in self._start(batch, [image])]
            if not isinstance(error, torch.OutOfMemoryError) or not batch.running:
                return [self._end(images[0][0], "failed", error)]
            count, batch.max_slots = 0, batch.running  # wait until one of them has ended
        ended = []
        for scheduled, image in images[:count]:
            scheduled.status = "running"
            self._running[image] = scheduled
            if image.history.done:
                batch.remove([image])
                ended.append(self._end(scheduled, "finished"))
        with self._lock:
            for scheduled, _ in reversed(images[count:]):
                scheduled.started_at = None
                self._waiting.appendleft(scheduled)
        return ended

    def _free_idle_batches(self) -> None:
        for key in [key for key, batch in self._batches.items() if not batch.slots or not batch.running]:
            self._batches[key].free_memory()

    def _end(self, image: ScheduledImage, status: Status, error: Exception | None = None) -> ScheduledImage:
        self._running = {running: owner for running, owner in self._running.items() if owner is not image}
        image.status, image.error, image.ended_at = status, error, time.perf_counter()
        return image


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, CapacityError | torch.OutOfMemoryError)
