"""Timing of drafters inside a decode, without changing it, and of work on a device."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.protocols import (
    CapturableDraft,
    Drafter,
    DraftRequest,
    Guidance,
    PassConfig,
    PrefillOutput,
    Prompt,
    VerifiedStep,
)
from underdraw.tree import DraftTree


class SpanTimer:
    """Adds up the time of named spans: wall time on a CPU, time between CUDA events on a GPU.

    A span uses the same two events every time, also inside a captured CUDA graph, so `collect` must be called before
    the span comes again.
    """

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self.device, self.captured, self.seconds = device, captured, 0.0
        # Events recorded inside a CUDA graph must be external, or their times cannot be read.
        self._event_options = {"enable_timing": True, **({"external": True} if captured else {})}
        self._events: dict[str, list[Any]] = {}
        supports_external = "external" in inspect.signature(torch.cuda.Event.__new__).parameters
        if captured and device.type == "cuda" and not supports_external:
            raise ConfigError(
                f"torch {torch.__version__} cannot measure time inside CUDA graphs; use torch 2.8 or newer."
            )

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            if name not in self._events:
                self._events[name] = [torch.cuda.Event(**self._event_options) for _ in range(2)]
            start, end = self._events[name]
            start.record()
            yield
            end.record()
        else:
            began = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - began

    def collect(self) -> None:
        """Add the time between the events of every span, waiting for the last one if necessary."""
        for start, end in self._events.values():
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1000


class TimedDrafter:
    """A drafter whose `draft` and `commit` are timed, also inside CUDA graphs."""

    def __init__(self, drafter: Drafter, timer: SpanTimer) -> None:
        self.drafter, self.timer, self.proposes = drafter, timer, drafter.proposes

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> TimedSession | TimedCapturableSession:
        session = self.drafter.open(prompts, layout, prefill, guidance=guidance)
        if self.timer.captured and isinstance(session, CapturableDraft):
            return TimedCapturableSession(session, self.timer)
        return TimedSession(session, self.timer)


class _TimedCalls:
    """Times the calls of a draft session."""

    def __init__(self, session: Any, timer: SpanTimer) -> None:
        self.session, self.timer = session, timer

    def draft(self, request: DraftRequest) -> DraftTree:
        with self.timer.span("draft"):
            return self.session.draft(request)

    def commit(self, verified: VerifiedStep) -> None:
        with self.timer.span("commit"):
            self.session.commit(verified)


class TimedSession(_TimedCalls):
    """A draft session that runs eagerly."""

    def commit(self, verified: VerifiedStep) -> None:
        super().commit(verified)
        self.timer.collect()


class TimedCapturableSession(_TimedCalls, CapturableDraft):
    """A draft session whose passes are captured: times are collected in `sync`, after the replay."""

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        return self.session.restart(prompts, prefill)

    def prepare(self, config: PassConfig) -> Hashable | None:
        return self.session.prepare(config)

    def sync(self, counts: tuple[int, ...]) -> None:
        self.timer.collect()
        self.session.sync(counts)


def device_ms(work: Callable[[], Any], repeats: int = 20, batch: int = 1) -> float:
    """Median milliseconds of `work`, by CUDA events over `batch` calls without a wait; wall time without a GPU."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(batch):
                work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / batch)
        else:
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written."""
    size = 2**32 if device.type == "cuda" else 2**26
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (device_ms(lambda: target.copy_(source)) / 1000)
