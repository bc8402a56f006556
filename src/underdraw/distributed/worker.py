"""ImageWorker: a pipeline and a scheduler that draw planned images, in whatever process they run."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from underdraw import __version__
from underdraw.distributed.planned_images import (
    DrawnImage,
    Event,
    FailedImage,
    ModelInfo,
    PlannedImage,
    Progress,
    PromptCheck,
    WorkerOptions,
)
from underdraw.engine.scheduler import ScheduledImage, Scheduler
from underdraw.errors import ConfigError, UnderdrawError
from underdraw.images import encode_png
from underdraw.io import pack_grid
from underdraw.models.loading import CheckImages
from underdraw.models.progress_bars import hidden_progress_bars
from underdraw.output import Stats, image_metadata
from underdraw.pipeline import Pipeline
from underdraw.registry import policies

SAMPLE_PROMPT = "red fox"  # also a class of ImageNet, for models that draw classes
HASHED_BYTES = 2**16  # at both ends of a file of weights
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
DIGITS = 4  # of seconds


@dataclasses.dataclass(slots=True)
class _Drawing:
    """An image between `add` and its PNG."""

    image: PlannedImage
    seconds: float = 0.0
    plain_seconds: float = 0.0
    fast: ScheduledImage | None = None  # finished, while plain decoding draws it again


class ImageWorker:
    """Draws images with one pipeline. PNG files are compressed by a thread while the next passes run."""

    def __init__(self, pipe: Pipeline, options: WorkerOptions) -> None:
        self.pipe, self._options = pipe, options
        self._base = pipe.request(SAMPLE_PROMPT, seed=0, **options.request)
        pipe.prompts(self._base)  # raises for a negative prompt that is too long
        self._settings = pipe.settings(self._base)
        self.slots = options.slots
        self._fast = Scheduler(pipe, slots=options.slots)
        self._try_pass()
        self._plain = Scheduler(pipe.plain(), slots=options.slots) if options.compare else None
        self._drawings: dict[ScheduledImage, _Drawing] = {}
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="png")
        self._encoding: list[tuple[_Drawing, dict[str, Any], Future[bytes]]] = []

    def _try_pass(self) -> None:
        """Draw a little of an image, so that parts that do not fit together are not taken for a prompt that fails."""
        (image,) = self._fast.add(self._base)
        while not image.is_done and not image.history.passes:  # an image that crashes a pass is tried once more
            self._fast.step()
        self._fast.cancel([image])
        self._fast.step()
        if image.error is not None:
            raise image.error

    @classmethod
    def load(cls, options: WorkerOptions, number: int = 0) -> ImageWorker:
        """Load the model, for worker `number` of this machine."""
        device = worker_device(options.pipeline["device"], number)
        check = CheckImages(options.request.get("height"), options.request.get("width"))
        with hidden_progress_bars(options.silent):
            pipe = Pipeline.from_pretrained(**{"check": check, **options.pipeline, "device": device})
        pipe.set_progress_bar_config(disable=True)
        return cls(pipe, options)

    def describe(self) -> ModelInfo:
        """The model, for records. `auto` is resolved for as many images as are drawn at once."""
        layout = self.pipe.model.make_layout(self._base.size)
        return ModelInfo(
            name=self.pipe.model.name,
            revision=model_revision(self.pipe),
            settings=self._settings,
            versions={"underdraw": __version__, "torch": torch.__version__},
            tree=policies.describe(self.pipe.tree_for_batch(self.slots)),
            tokens=layout.stop - layout.start - 1,
        )

    def set_tree(self, spec: str) -> None:
        """Use one tree policy in all workers of a run; records keep the name that the user gave."""
        name = self.pipe.tree_name
        if name == "auto":
            self.pipe.tree = spec
            self.pipe.tree_name = name
            self._fast.close()
            self._fast = Scheduler(self.pipe, slots=self.slots)

    def check(self, prompts: list[str]) -> PromptCheck:
        """Which prompts the model cannot read; warns of words that it was not trained with."""
        model = self.pipe.model
        model.warn_unknown_words(prompts)
        reasons: list[str | None] = []
        for prompt in prompts:
            try:
                model.check_prompt(prompt)
                reasons.append(None)
            except ConfigError as error:
                reasons.append(str(error))
        return PromptCheck(reasons, model.unknown_words(prompts))

    @property
    def images(self) -> int:
        """Number of images that were added and are not finished."""
        return len(self._drawings) + len(self._encoding)

    def add(self, image: PlannedImage) -> FailedImage | None:
        """Queue an image; returns why it cannot be drawn."""
        request = dataclasses.replace(
            self._base, prompts=[image.prompt], seeds=[image.seed], negative_prompts=self._base.negative_prompts[:1]
        )
        try:
            (scheduled,) = self._fast.add(request)
        except UnderdrawError as error:
            return _failed(image, error)
        self._drawings[scheduled] = _Drawing(image)
        return None

    def step(self) -> list[Event]:
        """Run one pass; returns images that are finished or have failed, and what the pass did."""
        events = self._advance(self._fast)
        if self._plain is not None and self._plain.has_work:
            events += self._advance(self._plain)
        return events + self._take_encoded(wait=not self._drawings)

    def close(self) -> None:
        for scheduler in (self._fast, self._plain):
            if scheduler is not None:
                scheduler.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def _advance(self, scheduler: Scheduler) -> list[Event]:
        if not scheduler.has_work:
            return []
        start = time.perf_counter()
        step = scheduler.step()
        elapsed = time.perf_counter() - start
        ran = {image for image, _ in step.results} | set(step.finished)
        for scheduled in ran:  # images that are drawn together share the time equally
            drawing = self._drawings[scheduled]
            if scheduler is self._plain:
                drawing.plain_seconds += elapsed / len(ran)
            else:
                drawing.seconds += elapsed / len(ran)
        events: list[Event] = []
        if step.results:
            events.append(Progress(sum(len(result.tokens) for _, result in step.results), len(step.results)))
        for scheduled in step.finished:
            events += self._end(scheduled)
        return events

    def _end(self, scheduled: ScheduledImage) -> list[Event]:
        """What follows the last pass of an image: an error, the comparison, or its PNG."""
        drawing = self._drawings.pop(scheduled)
        if scheduled.status != "finished":
            return [_failed(drawing.image, scheduled.error or UnderdrawError("it was cancelled"))]
        if self._plain is not None and drawing.fast is None:
            drawing.fast = scheduled
            (again,) = self._plain.add(scheduled.request)
            self._drawings[again] = drawing
            return []
        history = (drawing.fast or scheduled).history
        pixels = self.pipe.decode_images([history])[0]
        record = Stats.of([history], 0.0).to_record()
        del record["seconds"]  # differs from run to run
        if drawing.fast is not None:
            plain = self.pipe.decode_images([scheduled.history])[0]
            record |= {"plain_passes": scheduled.history.passes, "identical": pixels.tobytes() == plain.tobytes()}
        record["codes"] = pack_grid(history.layout.grid(history.tokens))
        metadata = image_metadata(drawing.image.prompt, drawing.image.seed, self.pipe.model.name, self._settings)
        self._encoding.append((drawing, record, self._encoder.submit(encode_png, pixels, metadata)))
        return []

    def _take_encoded(self, *, wait: bool) -> list[Event]:
        """The images whose PNG is ready."""
        events: list[Event] = []
        while self._encoding and (wait or self._encoding[0][2].done()):
            drawing, record, future = self._encoding.pop(0)
            timing = {"seconds": round(drawing.seconds, DIGITS)}
            if drawing.fast is not None:
                timing["plain_seconds"] = round(drawing.plain_seconds, DIGITS)
            events.append(DrawnImage(drawing.image, future.result(), record, timing))
        return events


def _failed(image: PlannedImage, error: Exception) -> FailedImage:
    reason = str(error) or type(error).__name__
    if not isinstance(error, UnderdrawError):
        reason = f"{type(error).__name__}: {reason}"
    return FailedImage(image, " ".join(reason.split()), isinstance(error, ConfigError))


def worker_device(device: str, number: int) -> str:
    """The device of worker `number`: with several GPUs each has its own, counted around."""
    gpus = torch.cuda.device_count()
    return f"cuda:{number % gpus}" if device in ("auto", "cuda") and gpus > 1 else device


def model_revision(pipe: Pipeline) -> str | None:
    """The commit of a model from the hub; for other files a hash of their names, sizes, beginnings and ends."""
    path = pipe.model.path
    if path is None:
        return None
    if path.parent.name == "snapshots":
        return path.name
    files = (
        [path]
        if path.is_file()
        else [file for file in sorted(path.rglob("*")) if file.suffix in WEIGHT_SUFFIXES and file.is_file()]
    )
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if file != path else ''} {size}\n".encode())
        digest.update(_both_ends(file, size))
    return f"sha256:{digest.hexdigest()[:16]}"


def _both_ends(file: Path, size: int) -> bytes:
    with open(file, "rb") as stream:
        start = stream.read(HASHED_BYTES)
        stream.seek(max(0, size - HASHED_BYTES))
        return start + stream.read(HASHED_BYTES)
