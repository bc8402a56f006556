"""Draw the missing images of a run with any kind of workers. No torch.

`draw_run` is all there is between the prompts of a file and the files of a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from underdraw.distributed.planned_images import (
    DrawnImage,
    Event,
    FailedImage,
    ModelInfo,
    PlannedImage,
    Workers,
    make_row,
    output_columns,
    plan_images,
)
from underdraw.errors import ConfigError
from underdraw.image_store import RunStorage
from underdraw.prompts import PromptRow, summarize_prompts
from underdraw.run_folder import RunFolder
from underdraw.shards import Format, StoredImage, infer_columns

CHECKED = 10_000  # prompts sent to a worker at once for checking
INFERRED = 1_000  # prompts that decide the types of Parquet columns


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run draws and how it is stored."""

    prompts: Iterable[PromptRow]  # iterated several times
    repeats: int
    seed: int
    format: Format = "folder"
    shard_size: int = 1000
    overlong: Literal["refuse", "skip"] = "refuse"
    compare: bool = False

    def images(self) -> Iterator[PlannedImage]:
        return plan_images(self.prompts, self.repeats, self.seed)

    def settings(self) -> dict[str, Any]:
        """What a run must have in common with the one that it resumes, as far as that is known without the model."""
        summary = summarize_prompts(self.prompts)
        return {
            "prompts": summary.count,
            "prompts_sha256": summary.sha256,
            "n": self.repeats,
            "seed": self.seed,
            "overlong": self.overlong,
            "compare": self.compare,
            "format": self.format,
            **({} if self.format == "folder" else {"shard_size": self.shard_size}),
        }


@dataclass(frozen=True, slots=True)
class RunResult:
    """What `draw_run` did."""

    images: int  # of the whole run
    drawn: int  # by this call
    skipped: int  # prompts that the model cannot read
    failed: int  # images that could not be drawn for another reason
    unknown_words: list[str]  # that the model was not trained with
    is_complete: bool  # False while other ranks are drawing


def draw_run(
    run: RunFolder,
    workers: Workers,
    spec: RunSpec,
    *,
    restart: bool = False,
    loading: dict[str, Any] | None = None,
    on_start: Callable[[ModelInfo, int], None] = lambda info, missing: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> RunResult:
    """Draw what the folder does not hold yet.

    `loading` says how to load the model again, for `underdraw verify`. `on_start` gets the number of missing images.
    """
    known = spec.settings()
    info = workers.start()
    settings = {
        "model": info.name,
        "revision": info.revision,
        **known,
        **info.settings,
        "versions": info.versions,
    }
    total = known["prompts"] * spec.repeats
    columns = infer_columns(output_columns(row.columns) for row in itertools.islice(spec.prompts, INFERRED))
    run.open(settings, RunStorage(total, spec.format, spec.shard_size, columns), restart=restart)
    refused, unknown_words = ({}, []) if run.is_started else _check_prompts(workers, spec, info)
    saved = run.start({"tree": info.tree, "unknown_words": unknown_words, "loading": loading or {}})
    for image in spec.images() if refused else ():
        if image.index // spec.repeats in refused and run.rank.draws(image.index):
            run.fail(_failed_row(FailedImage(image, refused[image.index // spec.repeats], True)))
    on_start(info, sum(_is_missing(run, index) for index in range(total)))
    drawn = _draw_missing(run, workers, spec, info, saved.get("tree", info.tree), on_event)
    is_complete = run.finish()
    failed = run.failed()
    skipped = {row["id"] for row in failed if row["permanent"]}
    others = sum(not row["permanent"] for row in failed)
    return RunResult(total, drawn, len(skipped), others, saved.get("unknown_words", []), is_complete)


def _is_missing(run: RunFolder, index: int) -> bool:
    return run.rank.draws(index) and not run.is_done(index)


def _check_prompts(workers: Workers, spec: RunSpec, info: ModelInfo) -> tuple[dict[int, str], list[str]]:
    """The numbers of the prompts that the model cannot read, and why; and the words that it does not know.

    An error unless such prompts are to be skipped.
    """
    refused: dict[int, str] = {}
    words: dict[str, None] = {}
    rows, count = iter(spec.prompts), 0
    while chunk := [row.prompt for row in itertools.islice(rows, CHECKED)]:
        check = workers.check(chunk)
        words |= dict.fromkeys(check.unknown_words)
        for number, reason in enumerate(check.reasons, start=count):
            if reason is None:
                continue
            if spec.overlong == "refuse":
                raise ConfigError(f"prompt {number + 1}: {reason} Or skip such prompts: --overlong skip.")
            refused[number] = reason
        count += len(chunk)
    if len(refused) == count:
        raise ConfigError(f"{info.name} can read none of the {count} prompts; shorten them.")
    return refused, list(words)


def _draw_missing(
    run: RunFolder, workers: Workers, spec: RunSpec, info: ModelInfo, tree: str, on_event: Callable[[Event], None]
) -> int:
    """Draw and store the missing images; what fails is tried once more at the end. Returns how many were drawn."""
    missing: Iterable[PlannedImage] = (image for image in spec.images() if _is_missing(run, image.index))
    drawn, again = 0, list[PlannedImage]()
    for attempt in (1, 2):
        for event in workers.draw(missing, tree):
            if isinstance(event, DrawnImage):
                if run.is_done(event.image.index):  # a lost worker had sent it already
                    continue
                run.add(StoredImage(event.png, make_row(event, info)), event.timing)
                drawn += 1
            elif isinstance(event, FailedImage):
                if attempt == 1 and not event.is_permanent:
                    again.append(event.image)
                    continue
                run.fail(_failed_row(event))
            on_event(event)
        missing = again
        if not again:
            break
    return drawn


def _failed_row(event: FailedImage) -> dict[str, Any]:
    image = event.image
    return {
        "index": image.index, "id": image.id, "repeat": image.repeat, "prompt": image.prompt, "seed": image.seed,
        "reason": event.reason, "permanent": event.is_permanent,
    }  # fmt: skip
