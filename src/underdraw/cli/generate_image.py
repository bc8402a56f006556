"""`underdraw generate` for one image: generates it, compares it if asked to, and writes all files at the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from underdraw.cli.progress import drafted_tokens, progress_bar

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image

    from underdraw.cli.generate import GenerateOptions
    from underdraw.engine.decode import TokenStatsMode
    from underdraw.history import StepResult
    from underdraw.output import PipelineOutput
    from underdraw.pipeline import Pipeline
    from underdraw.request import GenerationRequest

TRACE_KEYS = ("prompt", "seed", "model", "settings", "tokens_per_pass")


def generate_image(pipe: Pipeline, options: GenerateOptions, load_seconds: float) -> None:
    """Generate the image of `options` and write it, with the sheets and the trace that were asked for."""
    loading = load_record(pipe, load_seconds)
    request = pipe.request(str(options.prompt), seed=options.seed, **options.request())
    path = options.image_path(request.seeds[0])
    output, steps = _generate(pipe, request, options, "skip" if options.heatmap is None else "keep")
    record: dict[str, Any] = {
        "prompt": request.prompts[0],
        "seed": request.seeds[0],
        "model": pipe.model.name,
        "out": str(path),
        **output.stats.to_record(),
        "tokens_per_second": round(output.stats.tokens / output.stats.seconds, 4),
        "pass_ms": median_pass_ms(steps),
        "load": loading,
        "peak_device_bytes": peak_device_bytes(pipe),
        "settings": output.settings,
        "unknown_words": pipe.model.unknown_words(request.prompts),
    }
    plain = None
    if options.is_compared:
        plain, plain_steps = _generate(pipe.plain(), request, options, label="plain")
        record |= comparison_record(output, plain) | {"plain_pass_ms": median_pass_ms(plain_steps)}
    _write_images(path, options, output, plain, record)
    if options.trace is not None:
        from underdraw.bench.replay import Trace

        Trace.from_steps(steps, {key: record[key] for key in TRACE_KEYS}).save(options.trace)
    line = f"{path}: {summary_line(record)}; seed {record['seed']}"
    options.print(line, record)


def _generate(
    pipe: Pipeline,
    request: GenerationRequest,
    options: GenerateOptions,
    token_stats: TokenStatsMode = "skip",
    label: str = "",
) -> tuple[PipelineOutput[list[Image]], list[StepResult]]:
    """Run a request with a progress bar; returns its output and its passes."""
    steps: list[StepResult] = []
    total = drafted_tokens(pipe.model.make_layout(request.size))
    with progress_bar(total, silent=options.silent, label=label) as advance:

        def on_step_end(pipe: Any, index: int, step: int, details: dict[str, Any]) -> None:
            advance(pipe, index, step, details)
            steps.append(details["step"])

        return pipe.generate(request, callback_on_step_end=on_step_end, token_stats=token_stats), steps


def _write_images(
    path: Path,
    options: GenerateOptions,
    output: PipelineOutput[list[Image]],
    plain: PipelineOutput[list[Image]] | None,
    record: dict[str, Any],
) -> None:
    from underdraw.images import save_png, side_by_side

    sheets = []  # drawn before anything is written, so that an error leaves no files
    if options.heatmap is not None:
        sheets.append((output.heatmap(), options.heatmap))
        record["heatmap"] = str(options.heatmap)
    if options.compare_image is not None and plain is not None:
        pairs = [
            (plain.images[0], f"plain: {plain.stats.seconds:.2f} s, {plain.stats.passes} passes"),
            (output.images[0], f"underdraw: {output.stats.seconds:.2f} s, {output.stats.passes} passes"),
        ]
        title = f"{pixels_phrase(record)}, {record['speedup']:.2f}x the speed"
        sheets.append((side_by_side(pairs, title), options.compare_image))
        record["compare_image"] = str(options.compare_image)
    output.save(path)
    for sheet, sheet_path in sheets:
        save_png(sheet, sheet_path)


def comparison_record(output: PipelineOutput[list[Image]], plain: PipelineOutput[list[Image]]) -> dict[str, Any]:
    """How plain sampling with the same seed compares with the first image."""
    return {
        "plain_seconds": round(plain.stats.seconds, 4),
        "plain_passes": plain.history.passes,
        "speedup": round(plain.stats.seconds / output.stats.seconds, 4),
        "identical": output.images[0].tobytes() == plain.images[0].tobytes(),
    }


def summary_line(record: dict[str, Any]) -> str:
    """Seconds, passes and tokens per pass of a record, and the comparison with plain sampling if it has one."""
    text = (
        f"{record['seconds']:.2f} s, {record['passes']} passes, {record['tokens']} tokens, "
        f"{record['tokens_per_pass']:.2f} tokens per pass"
    )
    if "speedup" in record:
        text += (
            f"; without speculation {record['plain_seconds']:.2f} s, {pixels_phrase(record)}: "
            f"{record['speedup']:.2f}x the speed"
        )
    return text


def pixels_phrase(record: dict[str, Any]) -> str:
    """Whether speculation changed the image, in words."""
    return "identical pixels" if record["identical"] else "different pixels"


def median_pass_ms(steps: Sequence[StepResult]) -> float:
    """The median latency of a pass, which compilation and CUDA graph capture of the first passes do not move."""
    return round(1000 * statistics.median(step.seconds for step in steps), 3)


def peak_device_bytes(pipe: Pipeline) -> int | None:
    """The peak of torch's allocations on the pipeline's GPU; None on a CPU."""
    from underdraw.engine.memory_stats import peak_bytes

    return peak_bytes(pipe.device) if pipe.device.type == "cuda" else None


def load_record(pipe: Pipeline, seconds: float) -> dict[str, Any]:
    """Seconds and bytes of loading; the peak of host memory counts memory-mapped files, `own_host_bytes` does not."""
    from underdraw.engine.memory_stats import process_bytes

    tensors = {tensor for module in pipe.components.values() for tensor in (*module.parameters(), *module.buffers())}
    packed = {tensor for tensor in tensors if tensor.is_mkldnn}  # these have no storage
    storages = [tensor.untyped_storage() for tensor in tensors - packed]
    weight_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return {
        "seconds": round(seconds, 3),
        "weight_bytes": weight_bytes + sum(tensor.nbytes for tensor in packed),
        "peak_device_bytes": peak_device_bytes(pipe),
        "peak_host_bytes": process_bytes("VmHWM"),
        "own_host_bytes": process_bytes("RssAnon"),
    }
