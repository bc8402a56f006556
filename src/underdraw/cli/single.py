"""`generate` for one picture: draw it, compare it, write everything that was asked for at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from underdraw.cli.footprint import loaded, pass_ms, peak
from underdraw.cli.report import close, compared, figures, progress, rounded, sentence, work
from underdraw.cli.task import Sampling, Task, check_output

if TYPE_CHECKING:
    from PIL.Image import Image

    from underdraw.engine.decode import TokenStatsMode
    from underdraw.history import StepResult
    from underdraw.output import PipelineOutput
    from underdraw.pipeline import Pipeline
    from underdraw.request import GenerationRequest


def draw_one(pipe: Pipeline, task: Task, sampling: Sampling, load_seconds: float) -> None:
    """Draw the picture of a task and write it."""
    load = loaded(pipe, load_seconds)
    request = pipe.request(task.prompts[0], seed=task.seed, **sampling.arguments())
    seed = request.seeds[0]
    path = task.file(seed)
    check_output(path, task.force)
    out, steps = _draw(pipe, task, request, token_stats="skip" if task.heatmap is None else "keep")
    record: dict[str, Any] = {
        "prompt": task.prompts[0], "seed": seed, "model": pipe.model.name, "out": str(path), **figures(out.stats),
        "tokens_per_second": rounded(out.stats.tokens / out.stats.seconds), "pass_ms": pass_ms(steps), "load": load,
        "peak_device_bytes": peak(pipe), "settings": out.settings,
    }  # fmt: skip
    plain = None
    if task.compare:
        plain, alone = _draw(pipe.plain(), task, request, "plain")
        record |= compared(out, plain)[0] | {"plain_pass_ms": pass_ms(alone)}
    _write(task, out, plain, record)
    if task.trace is not None:
        from underdraw.bench.replay import Trace

        kept = ("prompt", "seed", "model", "settings", "tokens_per_pass")
        Trace.of(steps, {key: record[key] for key in kept}).save(task.trace)
    close(f"{path}: {sentence(record)}; seed {seed}", record, as_json=task.json, quiet=task.quiet)


def _draw(
    pipe: Pipeline, task: Task, request: GenerationRequest, label: str = "", token_stats: TokenStatsMode = "skip"
) -> tuple[PipelineOutput[list[Image]], list[StepResult]]:
    """A picture, with a bar of its tokens, and its passes."""
    steps: list[StepResult] = []
    with progress(work(pipe.model.make_layout(request.size)), silent=task.silent, label=label) as advance:

        def note(own: Any, index: int, cell: int, known: dict[str, Any]) -> None:
            advance(own, index, cell, known)
            steps.append(known["step"])

        return pipe.generate(request, callback_on_step_end=note, token_stats=token_stats), steps


def _write(
    task: Task, out: PipelineOutput[list[Image]], plain: PipelineOutput[list[Image]] | None, record: dict[str, Any]
) -> None:
    from underdraw.images import save_png, side_by_side

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
    save_png(out.images[0], task.file(out.seeds[0]), out.metadata())
    for sheet, path in sheets:
        save_png(sheet, path)
