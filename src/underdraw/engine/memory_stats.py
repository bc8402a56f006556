"""Peak memory of a GPU or of the process, for records."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def process_bytes(field: str) -> int | None:
    """A size from Linux's status of this process, such as VmHWM (peak) or RssAnon; None on other systems."""
    with suppress(OSError):
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def reset_peak_bytes(device: torch.device) -> None:
    """Measure the peak from now on; outside Linux that of the process stays the one since its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            _CLEAR.write_text("5")  # resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """The most bytes that torch has allocated on a GPU, or that the process has held in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = process_bytes("VmHWM")
    if peak is None:
        import resource  # not on every system

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak
