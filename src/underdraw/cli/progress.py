"""What users see of a command: a progress bar in tokens, one line or JSON object at the end, and the figures in it."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from underdraw.history import StepResult
    from underdraw.layout import Layout
    from underdraw.output import PipelineOutput, Stats
    from underdraw.pipeline import Pipeline

StepCallback = Callable[[Any, int, int, dict[str, Any]], None]


def drafted_tokens(layout: Layout) -> int:
    """Tokens of one image that target passes generate: all but the first, which is sampled after the prefill."""
    return layout.stop - layout.start - 1


@contextmanager
def progress_bar(total: int, *, silent: bool, label: str = "") -> Iterator[StepCallback]:
    """Show a bar of `total` tokens on a terminal; yields the `callback_on_step_end` that advances it."""
    from tqdm import tqdm

    is_hidden = silent or not sys.stderr.isatty()
    passes = tokens = 0
    with tqdm(total=total, unit="tok", desc=label or None, file=sys.stderr, disable=is_hidden, leave=False) as bar:

        def advance(_pipe: Any, _index: int, _step: int, details: dict[str, Any]) -> None:
            nonlocal passes, tokens
            accepted = len(details["step"].tokens)
            passes, tokens = passes + 1, tokens + accepted
            bar.set_postfix_str(f"{tokens / passes:.2f} tokens/pass", refresh=False)
            bar.update(accepted)

        yield advance


def print_result(line: str, record: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Print the last line of a command: its record as JSON, or the line for people."""
    if as_json:
        print(json.dumps(record))
    elif not quiet:
        print(line)


def rounded(value: Any) -> Any:
    """Floats with four decimals, for records; anything else unchanged."""
    return round(value, 4) if isinstance(value, float) else value


def stats_record(stats: Stats) -> dict[str, Any]:
    """The statistics of a call, rounded."""
    return {key: rounded(value) for key, value in dataclasses.asdict(stats).items()}


def comparison_records(output: PipelineOutput[list[Image]], plain: PipelineOutput[list[Image]]) -> list[dict[str, Any]]:
    """For every image, how plain sampling with the same seed compares; images of a batch share its time equally."""
    return [
        {
            "plain_seconds": rounded(plain.stats.seconds / len(plain.images)),
            "plain_passes": history.passes,
            "speedup": rounded(plain.stats.seconds / output.stats.seconds),
            "identical": image.tobytes() == plain_image.tobytes(),
        }
        for image, plain_image, history in zip(output.images, plain.images, plain.histories, strict=True)
    ]


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
    return "identical pixels" if record["identical"] else "other pixels"


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

    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in pipe.components.values()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return {
        "seconds": round(seconds, 3),
        "weight_bytes": sum(storages.values()),
        "peak_device_bytes": peak_device_bytes(pipe),
        "peak_host_bytes": process_bytes("VmHWM"),
        "own_host_bytes": process_bytes("RssAnon"),
    }
