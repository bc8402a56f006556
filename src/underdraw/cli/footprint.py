"""What loading and drawing took of time and memory, for the JSON records of `generate`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underdraw.history import StepResult
    from underdraw.pipeline import Pipeline


def loaded(pipe: Pipeline, seconds: float) -> dict[str, Any]:
    """Seconds and bytes of loading. What the process holds at its peak counts mapped files, which cost no memory."""
    import torch

    parts = (
        pipe.model.target.net,
        pipe.model.target.projection,
        pipe.model.image_tokenizer,
        getattr(pipe.drafter, "net", None),
    )
    weights = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for part in parts
        if isinstance(part, torch.nn.Module)
        for tensor in (*part.parameters(), *part.buffers())
    }
    return {
        "seconds": round(seconds, 3),
        "weight_bytes": sum(weights.values()),
        "peak_device_bytes": peak(pipe),
        "peak_host_bytes": _status("VmHWM"),
        "own_host_bytes": _status("RssAnon"),
    }


def peak(pipe: Pipeline) -> int | None:
    """The most bytes that torch has held on the pipeline's GPU."""
    import torch

    return torch.cuda.max_memory_allocated(pipe.device) if pipe.device.type == "cuda" else None


def pass_ms(steps: Sequence[StepResult]) -> float:
    """Milliseconds of a pass in the middle of all: what compiling and capturing took does not show."""
    return round(1000 * statistics.median(step.seconds for step in steps), 3)


def _status(name: str) -> int | None:
    """A line of what Linux says of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
