"""Draw images of a finished run again and compare them with what is stored."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from underdraw.distributed.local import ThisProcess
from underdraw.distributed.planned_images import DrawnImage, Event, ModelInfo, PlannedImage, WorkerOptions
from underdraw.distributed.worker import ImageWorker
from underdraw.errors import ConfigError
from underdraw.image_store import ImageFiles, RunLayout, Shards
from underdraw.pipeline import Pipeline
from underdraw.run_folder import RunFolder
from underdraw.shards import StoredImage


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run on disk."""

    folder: Path
    content: dict[str, Any]  # of run.json

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments that load its model."""
        return dict(self.content["loading"])

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of `Pipeline.request` that its images share."""
        settings = self.content["settings"]
        names = ("height", "width", "temperature", "top_k", "top_p", "negative_prompt")
        return {"guidance_scale": settings["guidance"], **{name: settings[name] for name in names}}

    def images(self) -> Iterator[StoredImage]:
        """All finished images."""
        if self.content["settings"]["format"] == "folder":
            return ImageFiles(self.folder).images()
        return Shards(self.folder, RunLayout(0)).images()


@dataclass(frozen=True, slots=True)
class Verification:
    """How many images were drawn again, and which of them differ."""

    images: int
    drawn: int
    identical: int
    different: list[int]  # indices


def read_run(folder: Path) -> StoredRun:
    """The run in a folder; an error if there is none, or if it is of an older version."""
    content = RunFolder(folder).saved()
    if content is None or "loading" not in content:
        raise ConfigError(
            f"{folder} holds no run that can be verified; name a folder of `underdraw generate --prompts`."
        )
    return StoredRun(folder, content)


def check_run(
    run: StoredRun,
    pipe: Pipeline,
    sample: int,
    seed: int,
    batch: int,
    *,
    on_start: Callable[[ModelInfo, int], None],
    on_event: Callable[[Event], None],
) -> Verification:
    """Draw `sample` images of the run again, or all of them if it is 0, and compare their pixels."""
    stored, images = _sample(run.images(), sample, seed)
    worker = ThisProcess(ImageWorker(pipe, WorkerOptions({}, run.request, slots=batch)))
    info = worker.start()
    revision = run.content["settings"]["revision"]
    if info.revision != revision:
        raise ConfigError(f"the run was drawn with the model of revision {revision}, and this one is {info.revision}.")
    on_start(info, len(stored))
    planned = [
        PlannedImage(row["index"], row["id"], row["repeat"], row["prompt"], row["seed"])
        for row in (image.row for image in stored.values())
    ]
    different: list[int] = []
    try:
        for event in worker.draw(planned, run.content["tree"]):
            on_event(event)
            if not isinstance(event, DrawnImage):
                continue
            if _pixels(event.png) != _pixels(stored.pop(event.image.index).png):
                different.append(event.image.index)
    finally:
        worker.close()
    different += stored  # those that could not be drawn
    return Verification(images, len(planned), len(planned) - len(different), sorted(different))


def _sample(images: Iterator[StoredImage], count: int, seed: int) -> tuple[dict[int, StoredImage], int]:
    """A uniform sample of a stream by index, and the length of the stream. The images are read once."""
    generator, kept, total = random.Random(seed), list[StoredImage](), 0
    for total, image in enumerate(images, start=1):
        if count == 0 or len(kept) < count:
            kept.append(image)
        elif (position := generator.randrange(total)) < count:
            kept[position] = image
    return {image.index: image for image in sorted(kept, key=lambda image: image.index)}, total


def _pixels(png: bytes) -> bytes:
    with Image.open(io.BytesIO(png)) as image:
        return image.convert("RGB").tobytes()
