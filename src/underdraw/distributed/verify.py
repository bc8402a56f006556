"""Draw images of a finished run again and compare them with what is stored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw.distributed.local import ThisProcess
from underdraw.distributed.planned_images import DrawnImage, Event, ModelInfo, PlannedImage, WorkerOptions
from underdraw.distributed.worker import ImageWorker
from underdraw.errors import ConfigError
from underdraw.image_store import ImageFiles, RunStorage, Shards
from underdraw.images import read_image
from underdraw.pipeline import Pipeline
from underdraw.ranges import check_seed
from underdraw.run_folder import SETTINGS_FILE, RunFolder
from underdraw.shards import StoredImage

REQUEST = ("height", "width", "temperature", "top_k", "top_p", "negative_prompt")
LOADING = ("model", "drafter", "tree", "verifier", "dtype", "numerics", "weights")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run on disk."""

    folder: Path
    content: dict[str, Any]  # of run.json

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments that load its model."""
        return {name: str(value) for name, value in self.content["loading"].items() if name in LOADING}

    @property
    def request(self) -> dict[str, Any]:
        """Arguments of `Pipeline.request` that its images share."""
        settings = self.content["settings"]
        return {"guidance_scale": settings["guidance"], **{name: settings[name] for name in REQUEST}}

    def images(self) -> Iterator[StoredImage]:
        """All finished images."""
        if self.content["settings"]["format"] == "folder":
            return ImageFiles(self.folder).images()
        return Shards(self.folder, RunStorage(0)).images()


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
    if content is None or not isinstance(content.get("loading"), dict) or "model" not in content["loading"]:
        raise ConfigError(
            f"{folder} holds no run that can be verified; name a folder of `underdraw generate --prompts`."
        )
    run = StoredRun(folder, content)
    for name in ("format", "revision", "guidance", *REQUEST):
        if name not in content["settings"]:
            raise ConfigError(f"{folder / SETTINGS_FILE} has no {name}; it is damaged, or of an older version.")
    return run


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
    if not stored:
        raise ConfigError(f"{run.folder} holds no finished images; run its command again first.")
    worker = ThisProcess(ImageWorker(pipe, WorkerOptions({}, run.request, slots=batch)))
    info = worker.start()
    revision = run.content["settings"]["revision"]
    if info.revision != revision:
        raise ConfigError(f"the run was drawn with the model of revision {revision}, and this one is {info.revision}.")
    on_start(info, len(stored))
    planned = [_plan(image.row, run.folder) for image in stored.values()]
    different: list[int] = []
    try:
        for event in worker.draw(planned, run.content.get("tree", "auto")):
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


def _plan(row: dict[str, Any], folder: Path) -> PlannedImage:
    """The image of a row, to be drawn again."""
    try:
        check_seed(row["seed"])
        return PlannedImage(row["index"], str(row["id"]), row["repeat"], row["prompt"], row["seed"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"image {row['index']} of {folder} has no id, repeat or seed in its row ({error}).") from None


def _pixels(png: bytes) -> bytes | None:
    """The pixels of an image; None if it is damaged."""
    try:
        return read_image(Path("image.png"), png).tobytes()
    except ConfigError:
        return None
