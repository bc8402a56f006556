"""`generate` for one picture: draw it, compare it, write everything that was asked for at the end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from underdraw import __version__
from underdraw.cli.report import close, compared, figures, progress, sentence, work
from underdraw.cli.task import Sampling, Task, check_output

if TYPE_CHECKING:
    from underdraw.history import Step
    from underdraw.job import Job
    from underdraw.pipeline import Pipeline
    from underdraw.results import PipelineOutput


def draw_one(pipe: Pipeline, task: Task, sampling: Sampling) -> None:
    """Draw the picture of a task and write it."""
    job = pipe.job(task.prompts[0], seed=task.seed, **sampling.arguments())
    seed = job.seeds[0]
    path = task.file(seed)
    check_output(path, task.force)
    arguments: dict[str, Any] = {"prompt": task.prompts, "seed": seed, **sampling.arguments()}
    total = work(pipe.model.layout(job.size))
    steps: list[Step] = []
    with progress(total, silent=task.silent) as advance:

        def note(own: Any, index: int, cell: int, known: dict[str, Any]) -> None:
            advance(own, index, cell, known)
            steps.append(known["step"])

        out = pipe(callback_on_step_end=note, laws="skip" if task.heatmap is None else "keep", **arguments)
    record: dict[str, Any] = {
        "prompt": task.prompts[0], "seed": seed, "model": pipe.model.name, "out": str(path), **figures(out.stats),
        "settings": pipe.settings(job),
    }  # fmt: skip
    plain = None
    if task.compare:
        with progress(total, silent=task.silent, label="plain") as advance:
            plain = pipe.plain()(callback_on_step_end=advance, **arguments)
        record.update(compared(out, plain)[0])
    _write(pipe, task, job, out, plain, record)
    if task.trace is not None:
        from underdraw.evaluation.replay import Trace

        kept = ("prompt", "seed", "model", "settings", "tokens_per_pass")
        Trace.of(steps, {key: record[key] for key in kept}).save(task.trace)
    close(f"{path}: {sentence(record)}; seed {seed}", record, as_json=task.json, quiet=task.quiet)


def metadata(pipe: Pipeline, prompt: str, seed: int, job: Job) -> dict[str, str]:
    """The text chunks of a picture: everything that is needed to draw it again."""
    return {
        "prompt": prompt,
        "seed": str(seed),
        "model": pipe.model.name,
        "settings": json.dumps(pipe.settings(job)),
        "Software": f"underdraw {__version__}",
    }


def _write(
    pipe: Pipeline, task: Task, job: Job, out: PipelineOutput, plain: PipelineOutput | None, record: dict[str, Any]
) -> None:
    from underdraw.pictures import save_png, side_by_side

    sheets = []  # made first, so that nothing is written if one cannot be
    if task.heatmap is not None:
        sheets.append((out.heatmap(), task.heatmap))
        record["heatmap"] = str(task.heatmap)
    if task.compare_image is not None and plain is not None:
        pairs = [
            (plain.images[0], f"plain: {plain.stats.seconds:.2f} s, {plain.stats.passes} passes"),
            (out.images[0], f"underdraw: {out.stats.seconds:.2f} s, {out.stats.passes} passes"),
        ]
        same = "identical pixels" if record["identical"] else "other pixels"
        sheets.append((side_by_side(pairs, f"{same}, {record['speedup']:.2f}x the speed"), task.compare_image))
        record["compare_image"] = str(task.compare_image)
    save_png(out.images[0], task.file(job.seeds[0]), metadata(pipe, task.prompts[0], job.seeds[0], job))
    for sheet, path in sheets:
        save_png(sheet, path)
