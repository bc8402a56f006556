"""The figures in the records of `generate`: speed, memory, and the comparison with plain sampling."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from underdraw.history import StepResult
    from underdraw.output import PipelineOutput
    from underdraw.pipeline import Pipeline


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
