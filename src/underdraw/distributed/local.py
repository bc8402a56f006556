"""Workers on this machine: this process itself, or a process per GPU or share of the cores.

Images are handed out as slots become free, a few more than a worker draws at once. A worker that is killed or crashes
is replaced and its images are drawn again. An image that was there every time is drawn alone, and given up if that ends
the worker too.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from underdraw.distributed import planned_images as planned
from underdraw.errors import CapacityError, ConfigError, UnderdrawError

if TYPE_CHECKING:
    from underdraw.distributed.worker import ImageWorker

log = logging.getLogger(__name__)
QUEUE = 2  # images handed to a worker per slot
DEATHS_TOGETHER, DEATHS = 2, 3  # of the workers of an image: until it is drawn alone, until it is given up
MAX_RESTARTS = 4  # of a worker that has finished nothing since it started
STOP_SECONDS = 10.0
PROGRAM = ("-m", "underdraw.distributed.process")


def total_threads() -> int:
    """How many CPU threads one process would use: OMP_NUM_THREADS, or the cores that it may run on."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThisProcess:
    """Draws in this process."""

    def __init__(self, worker: ImageWorker) -> None:
        self._worker = worker

    def start(self) -> planned.ModelInfo:
        return self._worker.describe()

    def check(self, prompts: list[str]) -> planned.PromptCheck:
        return self._worker.check(prompts)

    def draw(self, images: Iterable[planned.PlannedImage], tree: str) -> Iterator[planned.Event]:
        worker, waiting = self._worker, iter(images)
        worker.set_tree(tree)
        while True:
            while worker.images < worker.slots and (image := next(waiting, None)) is not None:
                if failed := worker.add(image):
                    yield failed
            if not worker.images:
                return
            yield from worker.step()

    def close(self) -> None:
        self._worker.close()


@dataclass(slots=True)
class _Process:
    """A worker process and what it is doing."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    is_ready: bool = False
    is_alone: bool = False  # draws one image that others may have ended for
    restarts: int = 0  # since it last finished an image
    images: dict[int, planned.PlannedImage] = field(default_factory=dict)


class WorkerProcesses:
    """Draws in `count` processes, each with a GPU or a share of the cores."""

    def __init__(self, options: planned.WorkerOptions, count: int, program: Sequence[str] = PROGRAM) -> None:
        """`program` has the arguments of Python that start a worker process."""
        self._options, self._program, self._threads = options, program, max(1, total_threads() // count)
        self._workers = [self._launch(number) for number in range(count)]
        self._deaths: Counter[int] = Counter()  # by index of the image

    def process_ids(self) -> list[int]:
        """The worker processes that are alive or were a moment ago."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> planned.ModelInfo:
        for worker in self._workers:  # they load in parallel
            if not worker.is_ready:
                self._info: planned.ModelInfo = self._receive(worker)
                worker.is_ready = True
        return self._info

    def check(self, prompts: list[str]) -> planned.PromptCheck:
        self._workers[0].connection.send(("check", prompts))
        answer: planned.PromptCheck = self._receive(self._workers[0])
        return answer

    def _receive(self, worker: _Process) -> Any:
        """The answer of a worker; raises the error that it sent instead."""
        try:
            while isinstance(answer := worker.connection.recv(), planned.Progress):
                pass  # the last report of an earlier run
        except (EOFError, OSError):
            raise CapacityError(
                f"worker {worker.number} ended with code {worker.process.wait()} before it drew anything; is there "
                f"memory for {len(self._workers)} workers?"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def draw(self, images: Iterable[planned.PlannedImage], tree: str) -> Iterator[planned.Event]:
        self._tree = tree
        for worker in self._workers:
            worker.connection.send(("tree", tree))
        self._waiting: Iterator[planned.PlannedImage] = iter(images)
        self._is_exhausted = False
        self._suspects: deque[planned.PlannedImage] = deque()
        while True:
            for worker in list(self._workers):
                yield from self._hand_out(worker)
            if self._is_exhausted and not self._suspects and not any(worker.images for worker in self._workers):
                return
            for ready in wait([worker.connection for worker in self._workers]):
                worker = next(worker for worker in self._workers if worker.connection is ready)
                yield from self._take(worker)

    def _hand_out(self, worker: _Process) -> Iterator[planned.Event]:
        """Give a worker images until it has enough for its slots."""
        new: list[planned.PlannedImage] = []
        if worker.is_ready and self._suspects and not worker.images:
            new.append(self._suspects.popleft())
            worker.is_alone = True
        while worker.is_ready and not worker.is_alone and len(worker.images) + len(new) < QUEUE * self._options.slots:
            image = next(self._waiting, None)
            if image is None:
                self._is_exhausted = True
                break
            new.append(image)
        worker.images |= {image.index: image for image in new}
        if new:
            try:
                worker.connection.send(("draw", new))
            except OSError:  # it has just ended
                yield from self._replace(worker)

    def _take(self, worker: _Process) -> Iterator[planned.Event]:
        """Read what a worker sent."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._replace(worker)
            return
        if isinstance(message, UnderdrawError):  # a replacement that could not load the model
            raise message
        if isinstance(message, planned.ModelInfo):
            if message != self._info:
                raise ConfigError("the model was changed while its images were drawn; start again in a new folder.")
            worker.is_ready = True
            worker.connection.send(("tree", self._tree))
            return
        if not isinstance(message, planned.Progress):
            worker.images.pop(message.image.index, None)
            worker.restarts, worker.is_alone = 0, False
        yield message

    def _replace(self, worker: _Process) -> Iterator[planned.Event]:
        """Start a new process instead of one that ended, and hand its images to others."""
        worker.connection.close()
        code = worker.process.wait()
        log.warning("worker %d ended with code %d; its images are drawn again", worker.number, code)
        again = []
        for image in worker.images.values():
            self._deaths[image.index] += 1
            if self._deaths[image.index] >= DEATHS:
                yield planned.FailedImage(image, f"the worker that drew it alone ended with code {code}", False)
            elif self._deaths[image.index] >= DEATHS_TOGETHER:
                self._suspects.append(image)
            else:
                again.append(image)
        self._waiting, self._is_exhausted = chain(again, self._waiting), False
        self._workers.remove(worker)
        if worker.restarts < MAX_RESTARTS:
            replacement = self._launch(worker.number)
            replacement.restarts = worker.restarts + 1
            self._workers.append(replacement)
        elif not self._workers:
            raise CapacityError(
                f"all workers ended again and again, the last with code {code}; use fewer --workers, or a smaller "
                "--batch. The same command continues."
            )

    def _launch(self, number: int) -> _Process:
        ours, theirs = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        command = [sys.executable, *self._program, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        ours.send((self._options, number))
        return _Process(number, process, ours)

    def close(self) -> None:
        """End all workers: they stop when nobody listens any more."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            try:
                worker.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
