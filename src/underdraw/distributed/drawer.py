"""`Drawer`: a pipeline as a stateful class for `ds.map_batches(...)` of Ray Data. Runs without Ray, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from underdraw.distributed import planned_images as planned
from underdraw.distributed.local import ThisProcess
from underdraw.distributed.worker import ImageWorker
from underdraw.errors import ConfigError


class Drawer:
    """Draws the prompts of a batch and adds the columns `image` (PNG bytes), `seed`, `tokens_per_pass` and `error`.

    ds.map_batches(Drawer, fn_constructor_kwargs={"model": "tiny", "seed": 3}, batch_size=32, concurrency=2, num_gpus=1)

    The batch needs a column `prompt`. The seed of an image is that of its column `seed`, or else follows from the run's
    `seed` and the column `id`; so images do not depend on batches and actors. An image that fails has no bytes and an
    `error`. `slots` images are drawn together; larger batches keep the slots filled.
    """

    def __init__(
        self,
        model: str = "tiny",
        *,
        seed: int = 0,
        slots: int = 8,
        request: Mapping[str, Any] | None = None,
        **pipeline: Any,
    ) -> None:
        """`request` has options of `Pipeline.request`, such as guidance_scale; `pipeline` has those of loading."""
        options = planned.WorkerOptions({"device": "auto", **pipeline, "model": model}, dict(request or {}), slots)
        self._seed, self._workers = seed, ThisProcess(ImageWorker.load(options))
        self._info = self._workers.start()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with further columns: prompts (N,) to images (N,) as bytes."""
        images = self._plan(batch)
        drawn: dict[int, planned.DrawnImage] = {}
        errors: dict[int, str] = {}
        for event in self._workers.draw(images, self._info.tree):
            if isinstance(event, planned.DrawnImage):
                drawn[event.image.index] = event
            elif isinstance(event, planned.FailedImage):
                errors[event.image.index] = event.reason
        numbers = range(len(images))
        return {
            **batch,
            "seed": [image.seed for image in images],
            "image": [drawn[number].png if number in drawn else None for number in numbers],
            "tokens_per_pass": [
                drawn[number].record["tokens_per_pass"] if number in drawn else None for number in numbers
            ],
            "error": [errors.get(number) for number in numbers],
        }

    def _plan(self, batch: Mapping[str, Any]) -> list[planned.PlannedImage]:
        if "prompt" not in batch:
            raise ConfigError(f"a batch for Drawer needs the column prompt; it has {', '.join(batch)}.")
        prompts = [str(prompt) for prompt in batch["prompt"]]
        if "seed" in batch:
            seeds = [int(seed) for seed in batch["seed"]]
        elif "id" in batch:
            seeds = [planned.image_seed(self._seed, str(identity), 0) for identity in batch["id"]]
        else:
            raise ConfigError("a batch for Drawer needs the column id or seed, which decides the seeds of its images.")
        return [planned.PlannedImage(n, "", 0, *pair) for n, pair in enumerate(zip(prompts, seeds, strict=True))]


class RunDrawer:
    """The actor of `underdraw generate --ray`: draws planned images and returns what workers report."""

    def __init__(self, options: planned.WorkerOptions, tree: str | None = None) -> None:
        self._workers = ThisProcess(ImageWorker.load(options))
        self._tree = tree

    def describe(self) -> planned.ModelInfo:
        return self._workers.start()

    def check(self, prompts: list[str]) -> planned.PromptCheck:
        return self._workers.check(prompts)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Columns of `pack_images` to columns of `pack_event`."""
        assert self._tree is not None
        events = self._workers.draw(unpack_images(batch), self._tree)
        rows = [pack_event(event) for event in events if not isinstance(event, planned.Progress)]
        return {key: [row[key] for row in rows] for key in EVENT_COLUMNS}


IMAGE_COLUMNS = ("index", "id", "repeat", "prompt", "seed", "columns")
EVENT_COLUMNS = (*IMAGE_COLUMNS, "png", "record", "timing", "reason", "is_permanent")


def pack_image(image: planned.PlannedImage) -> dict[str, Any]:
    """A row of plain columns."""
    return {**{name: getattr(image, name) for name in IMAGE_COLUMNS}, "columns": json.dumps(dict(image.columns))}


def unpack_images(batch: Mapping[str, Sequence[Any]]) -> list[planned.PlannedImage]:
    rows = zip(*(batch[name] for name in IMAGE_COLUMNS), strict=True)
    return [_unpack_image(dict(zip(IMAGE_COLUMNS, row, strict=True))) for row in rows]


def _unpack_image(row: Mapping[str, Any]) -> planned.PlannedImage:
    return planned.PlannedImage(
        int(row["index"]), str(row["id"]), int(row["repeat"]), str(row["prompt"]), int(row["seed"]),
        json.loads(str(row["columns"])),
    )  # fmt: skip


def pack_event(event: planned.DrawnImage | planned.FailedImage) -> dict[str, Any]:
    """A drawn or failed image as a row of plain columns."""
    if isinstance(event, planned.DrawnImage):
        content = {"png": event.png, "record": json.dumps(event.record), "timing": json.dumps(event.timing)}
        return {**pack_image(event.image), **content, "reason": "", "is_permanent": False}
    content = {"png": b"", "record": "{}", "timing": "{}"}
    return {**pack_image(event.image), **content, "reason": event.reason, "is_permanent": event.is_permanent}


def unpack_event(row: Mapping[str, Any]) -> planned.DrawnImage | planned.FailedImage:
    image = _unpack_image(row)
    if row["reason"]:
        return planned.FailedImage(image, str(row["reason"]), bool(row["is_permanent"]))
    return planned.DrawnImage(image, bytes(row["png"]), json.loads(row["record"]), json.loads(row["timing"]))
