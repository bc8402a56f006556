"""Watching a decode from outside: the time that its drafter takes, and the most memory that it held.

The drafter is wrapped, the loop is not touched: the same calls with the same arguments in the same order.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from underdraw.layout import Layout
from underdraw.protocols import Drafter, DrafterSession, Opening, Outcome, Prompt, Request
from underdraw.tree import DraftTree

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Clock:
    """Adds up spans of time. On a CUDA device they are events, since launching work is not doing it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        if self.device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            self._events.append((began, ended))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        """The sum so far; waits for the device."""
        if self._events:
            torch.cuda.synchronize(self.device)
        return self._seconds + sum(began.elapsed_time(ended) for began, ended in self._events) / 1000


class Timed:
    """A drafter that keeps time."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self.drafter, self.clock = drafter, clock

    def open(self, prompts: Sequence[Prompt], layout: Layout, first: Opening, *, guidance: float) -> TimedSession:
        with self.clock.span():
            return TimedSession(self.drafter.open(prompts, layout, first, guidance=guidance), self.clock)


class TimedSession:
    def __init__(self, session: DrafterSession, clock: Clock) -> None:
        self.session, self.clock = session, clock

    def draft(self, request: Request) -> DraftTree:
        with self.clock.span():
            return self.session.draft(request)

    def commit(self, outcome: Outcome) -> None:
        with self.clock.span():
            self.session.commit(outcome)


class Memory:
    """The most memory that was held since it was made, in bytes.

    On a GPU it is the device's, on Linux the process's own, both from now on. Elsewhere only the most since the process
    began is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            _RESET.write_text("5")  # the kernel forgets the high-water mark

    @property
    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = _STATUS.read_text(encoding="utf-8").splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
        except (OSError, StopIteration):
            import resource  # not on every system

            scale = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
