"""EngineThread: the one thread that runs passes, and its bridge to asyncio.

Every tree policy in use has a scheduler of its own, so that plain and speculative decoding can run side by side. The
schedulers get equal shares of the time. Requests are submitted, cancelled and read on the event loop; passes, and the
decoding of tokens to pixels, happen in the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from underdraw.engine.scheduler import ScheduledImage, Scheduler
from underdraw.errors import ConfigError, unknown
from underdraw.history import StepResult
from underdraw.pipeline import Pipeline
from underdraw.protocols import PromptedImageTokenizer
from underdraw.registry import parse
from underdraw.request import GenerationRequest
from underdraw.serving import errors
from underdraw.serving.errors import ApiError
from underdraw.serving.warm_up import warm_up

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)
MAX_TREES = 4  # schedulers at a time
MAX_SIDE_SLOTS = 4  # of every scheduler but that of the tree `auto`
TREES = ("chain", "confidence", "adjacency", "trunk")  # that clients may name; `static` would read files
PREVIEW_SHARE, PREVIEW_SECONDS = 0.2, 0.1  # of the time that may go into previews; the least time between them
MAX_FAILURES = 3  # steps in a row that crashed or only failed images, after which the server is not ready


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one image."""

    image: ScheduledImage
    result: StepResult


@dataclass(frozen=True, slots=True)
class PartialPicture:
    """Pixels of the tokens so far."""

    image: ScheduledImage
    picture: Image
    cells: int  # that have a token


@dataclass(frozen=True, slots=True)
class Finished:
    """The pixels of a finished image."""

    image: ScheduledImage
    picture: Image


@dataclass(frozen=True, slots=True)
class Failed:
    """An image that will not be finished."""

    image: ScheduledImage
    error: ApiError


Event = Pass | PartialPicture | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """The images of one HTTP request; its events are read by one task of the event loop."""

    id: str
    scheduler: Scheduler  # that draws it
    request: GenerationRequest
    partial_images: int = 0  # pictures to decode on the way, evenly spaced
    live: bool = False  # send every pass, and previews as often as time allows
    images: list[ScheduledImage] = field(default_factory=list)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    preview_after: float = 0.0  # time of the next preview, so that both pictures of a race get theirs
    preview_is_read: bool = True  # set by the reader: a slow reader gets fewer previews, not a backlog
    is_cancelled: bool = False
    prompt_tokens: int = 0  # counted when the first image is finished
    _partials_sent: dict[ScheduledImage, int] = field(default_factory=dict)

    @property
    def pipe(self) -> Pipeline:
        return self.scheduler.pipe

    def partial_is_due(self, image: ScheduledImage) -> bool:
        """Whether the image has passed the next of `partial_images` marks."""
        layout = image.history.layout
        share = (image.history.next_step - layout.start) / (layout.stop - layout.start)
        passed = min(self.partial_images, math.floor(share * (self.partial_images + 1)))
        is_due = passed > self._partials_sent.get(image, 0) and not image.history.done
        self._partials_sent[image] = max(passed, self._partials_sent.get(image, 0))
        return is_due


@dataclass(slots=True, eq=False)
class TreeScheduler:
    """A scheduler, the pipeline with its tree policy, and how long it has run."""

    scheduler: Scheduler
    seconds: float = 0.0


class EngineThread:
    """Draws images for the server, at most `slots` at once with each tree policy and `queue` more waiting."""

    def __init__(self, pipe: Pipeline, *, slots: int, queue: int, needs_warm_up: bool = False) -> None:
        self.pipe, self.slots, self.queue = pipe, slots, queue
        self.on_event: Callable[[Event], None] = lambda event: None  # for metrics; called in the thread
        self.failures = 0  # steps in a row that crashed or only failed images
        self.warm_up_seconds: float | None = None  # set at the end of the warm-up
        self.warm_up_error: Exception | None = None
        self._is_warm = not needs_warm_up
        self._jobs: dict[ScheduledImage, Job] = {}
        self._schedulers: dict[str, TreeScheduler] = {}
        self._lock = threading.Condition()
        self._is_draining = self._is_stopped = False
        self._has_partials = not isinstance(pipe.model.image_tokenizer, PromptedImageTokenizer)  # needs all codes
        self._image_seconds = 1.0  # moving average of the time in a slot
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="underdraw-engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events arrive on `loop`."""
        self._loop = loop
        self._scheduler("auto")
        self._thread.start()

    def stop(self) -> None:
        """Cancel everything and end the thread after the pass that runs."""
        with self._lock:
            self._is_draining = self._is_stopped = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def running(self) -> int:
        return sum(entry.scheduler.running for entry in list(self._schedulers.values()))

    @property
    def waiting(self) -> int:
        return sum(entry.scheduler.waiting for entry in list(self._schedulers.values()))

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    @property
    def is_ready(self) -> bool:
        is_running = self._thread.is_alive() and self._is_warm and not self._is_draining
        return is_running and self.failures < MAX_FAILURES

    def retry_after(self) -> int:
        """Seconds after which a slot is likely to be free."""
        return max(1, min(120, math.ceil(self._image_seconds * len(self._jobs) / self.slots)))

    def submit(
        self, request: GenerationRequest, *, id: str, tree: str = "auto", partial_images: int = 0, live: bool = False
    ) -> Job:
        """Queue the images of a request; raises ApiError if there is no room, or the model cannot draw it."""
        with self._lock:
            if self._is_draining:
                raise errors.draining()
            if not self._is_warm:
                raise errors.starting()
            if len(request.prompts) > self.slots + self.queue:
                message = (
                    f"n {len(request.prompts)} is more than this server takes; use at most {self.slots + self.queue}."
                )
                raise ApiError(400, message, param="n", code="invalid_value")
            wanted = sum(not job.is_cancelled for job in self._jobs.values())  # others leave before the next pass
            if wanted + len(request.prompts) > self.slots + self.queue:
                raise errors.busy(self.retry_after())
            entry = self._scheduler(tree)
            scheduler = entry.scheduler
            if not scheduler.has_work:  # what it did before counts neither for nor against it
                busy = [other.seconds for other in self._schedulers.values() if other.scheduler.has_work]
                entry.seconds = min(busy, default=0.0)
            job = Job(id, scheduler, request, partial_images, live)
            try:
                job.images = scheduler.add(request, request_id=id)
            except ConfigError as error:
                raise ApiError(400, str(error), param="prompt", code="invalid_value") from None
            self._jobs.update(dict.fromkeys(job.images, job))
            self._lock.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Stop drawing a job before the next pass; its images leave their slots then."""
        job.is_cancelled = True
        with self._lock:
            job.scheduler.cancel([image for image in job.images if not image.is_done])
            self._lock.notify_all()

    def drain(self) -> None:
        """Refuse new requests and those that have only waited; those with an image in a slot are finished."""
        with self._lock:
            self._is_draining = True
            for job in set(self._jobs.values()):
                if all(image.started_at is None for image in job.images):
                    job.scheduler.cancel(job.images)
            self._lock.notify_all()

    def cancel_all(self) -> None:
        with self._lock:
            for image, job in self._jobs.items():
                job.scheduler.cancel([image])
            self._lock.notify_all()

    def _scheduler(self, tree: str) -> TreeScheduler:
        """The scheduler of a tree policy. Idle ones make room for new ones."""
        if tree in self._schedulers:
            return self._schedulers[tree]
        in_use = {job.scheduler for job in self._jobs.values()}  # has_work is false while an image is prefilled
        idle = [name for name, entry in self._schedulers.items() if name != "auto" and entry.scheduler not in in_use]
        if len(self._schedulers) >= MAX_TREES:
            if not idle:
                raise errors.busy(self.retry_after())
            self._schedulers.pop(idle[0]).scheduler.close()
        pipe = self.pipe if tree == "auto" else with_tree(self.pipe, tree)
        slots = self.slots if tree == "auto" else min(self.slots, MAX_SIDE_SLOTS)
        entry = TreeScheduler(Scheduler(pipe, slots=slots, token_stats="keep"))
        self._schedulers[tree] = entry
        return entry

    def _run(self) -> None:
        if not self._is_warm:
            try:
                started = time.perf_counter()
                log.info("warming up; --no-warm-up skips this")
                warm_up(self._schedulers["auto"].scheduler, lambda: self._is_draining)
                self.warm_up_seconds = time.perf_counter() - started
                self._is_warm = True
            except Exception as error:
                self.warm_up_error = error  # nothing can be drawn, so the server ends
                return
        while True:
            with self._lock:
                while not self._jobs and not self._is_stopped:
                    self._lock.wait()
                if self._is_stopped:
                    break
                busy = [item for item in self._schedulers.items() if item[1].scheduler.has_work]
                tree, entry = min(busy, key=lambda item: item[1].seconds, default=(None, None))
            if tree is None or entry is None:  # only cancelled images remain
                for image in list(self._jobs):
                    self._end(image)
                continue
            try:
                self._step(entry)
            except Exception as error:
                log.exception("a step of the scheduler with tree %s failed", tree)
                self._replace(tree, entry, error)
        self._fail(list(self._jobs), errors.draining())

    def _step(self, entry: TreeScheduler) -> None:
        """Run one pass of a scheduler and send its events."""
        started = time.perf_counter()
        step = entry.scheduler.step()
        entry.seconds += time.perf_counter() - started
        if step.results:
            self.failures = 0
        else:
            failed = [image.error for image in step.finished if image.error is not None]
            self.failures += any(errors.drawing_failed(error).status_code >= 500 for error in failed)
        for image, result in step.results:
            self._send(self._jobs[image], Pass(image, result))
            if not image.is_done:
                self._send_partial(image)
        for image in step.finished:
            self._end(image)

    def _replace(self, tree: str, entry: TreeScheduler, error: Exception) -> None:
        """Fail the images of a scheduler that crashed; the next request gets a new one."""
        self.failures += 1
        with self._lock:
            self._schedulers.pop(tree, None)
            crashed = [image for image, job in self._jobs.items() if job.scheduler is entry.scheduler]
        self._fail(crashed, error)

    def _send_partial(self, image: ScheduledImage) -> None:
        """Decode a partial picture if the job wants one now."""
        job = self._jobs[image]
        is_preview = job.live and job.preview_is_read and time.perf_counter() >= job.preview_after
        is_due = is_preview or (job.partial_images > 0 and job.partial_is_due(image))
        if not (is_due and self._has_partials):
            return
        started = time.perf_counter()
        history = image.history
        try:
            picture = job.pipe.decode_images([history])[0]
        except Exception:
            log.exception("request %s: a partial picture could not be decoded", job.id)
            return
        job.preview_is_read = False
        previewed = sum(other.live for other in list(self._jobs.values()))  # they share the time for previews
        seconds = (time.perf_counter() - started) * max(1, previewed)
        job.preview_after = started + max(PREVIEW_SECONDS, seconds / PREVIEW_SHARE)
        self._send(job, PartialPicture(image, picture, int((history.grid("tokens") >= 0).sum())))

    def _end(self, image: ScheduledImage) -> None:
        """Forget an image that left its slot, decode it and send it."""
        job = self._take(image)
        if image.status == "finished":
            self._image_seconds += 0.2 * (image.run_seconds - self._image_seconds)
            try:
                if not job.prompt_tokens:
                    job.prompt_tokens = count_prompt_tokens(job)
                picture = job.pipe.decode_images([image.history])[0]
            except Exception as error:
                self._send_failure(job, image, error)
            else:
                self._send(job, Finished(image, picture))
        elif image.status == "failed":
            self._send_failure(job, image, image.error or RuntimeError("no reason recorded"))
        elif not job.is_cancelled:
            self._send_failure(job, image, errors.draining())

    def _fail(self, images: list[ScheduledImage], error: Exception) -> None:
        for image in images:
            self._send_failure(self._take(image), image, error)

    def _take(self, image: ScheduledImage) -> Job:
        with self._lock:
            return self._jobs.pop(image)

    def _send_failure(self, job: Job, image: ScheduledImage, error: Exception) -> None:
        answer = errors.drawing_failed(error)
        if answer.status_code == 500:
            log.error("request %s: image %d failed", job.id, image.index, exc_info=error)
        self._send(job, Failed(image, answer))

    def _send(self, job: Job, event: Event) -> None:
        """Hand an event to the job's reader on the event loop."""
        self.on_event(event)
        if (isinstance(event, Pass) and not job.live) or self._loop is None or self._loop.is_closed():
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed a moment ago: nobody reads any more
            self._loop.call_soon_threadsafe(job.events.put_nowait, event)


def with_tree(pipe: Pipeline, tree: str) -> Pipeline:
    """The same model and drafter with another tree policy, which a client has named; raises ApiError."""
    try:
        spec = parse(tree)
        if spec.name in ("auto", "none") and spec.options:
            raise ConfigError(f"the tree {spec.name} has no options.")
        if spec.name == "none":
            return pipe.plain()
        if spec.name not in TREES:
            raise unknown("tree", spec.name, ("auto", "none", *TREES))
        return Pipeline(
            pipe.model,
            drafter=pipe.drafter,
            tree=tree,
            verifier=pipe.verifier,
            proposal=pipe.proposal,
            compile=pipe.compile,
            numerics=pipe.model.target.numerics,
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param="tree", code="invalid_value") from None


def count_prompt_tokens(job: Job) -> int:
    """Tokens of the prompt, without padding on the left; rows of features for models with a text encoder."""
    prefix = job.pipe.prompts(job.request.select([0]))[0].condition
    if not isinstance(prefix, tuple):
        return len(prefix)
    padding = next((index for index, token in enumerate(prefix) if token != prefix[0]), 1)
    return len(prefix) - (padding if padding > 1 else 0)
