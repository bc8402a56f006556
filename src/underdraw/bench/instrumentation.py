"""Watching a decode from outside: the time that its drafter takes.

The drafter is wrapped, the loop is not touched: the same calls with the same arguments in the same order.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.protocols import (
    CapturableDraft,
    Drafter,
    DrafterSession,
    DraftRequest,
    PassConfig,
    PrefillOutput,
    Prompt,
    VerifiedStep,
)
from underdraw.tree import DraftTree


class Clock:
    """Adds up spans of time. On a CUDA device they lie between events, since launching work is not doing it.

    A span has the same two events every time, also inside captured work, so `lap` has to be called before it comes
    again.
    """

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self.device, self.captured, self.seconds = device, captured, 0.0
        self._options = {"enable_timing": True, **({"external": True} if captured else {})}
        self._events: dict[str, list[Any]] = {}
        known = inspect.signature(torch.cuda.Event.__new__).parameters
        if captured and device.type == "cuda" and "external" not in known:
            raise ConfigError(
                f"torch {torch.__version__} cannot measure time inside captured passes; use torch 2.8 or newer."
            )

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            if name not in self._events:
                self._events[name] = [torch.cuda.Event(**self._options) for _ in range(2)]
            began, ended = self._events[name]
            began.record()
            yield
            ended.record()
        else:
            start = time.perf_counter()
            yield
            self.seconds += time.perf_counter() - start

    def lap(self) -> None:
        """Add what lies between the events, and wait for the last of them if need be."""
        for began, ended in self._events.values():
            ended.synchronize()
            self.seconds += began.elapsed_time(ended) / 1000


class Timed:
    """A drafter that keeps time, also where its passes are captured."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self.drafter, self.clock, self.proposes = drafter, clock, drafter.proposes

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> TimedSession | TimedLasting:
        session = self.drafter.open(prompts, layout, prefill, guidance=guidance)
        if self.clock.captured and isinstance(session, CapturableDraft):
            return TimedLasting(session, self.clock)
        return TimedSession(session, self.clock)


class TimedSession:
    def __init__(self, session: DrafterSession, clock: Clock) -> None:
        self.session, self.clock = session, clock

    def draft(self, request: DraftRequest) -> DraftTree:
        with self.clock.span("draft"):
            return self.session.draft(request)

    def commit(self, verified: VerifiedStep) -> None:
        with self.clock.span("commit"):
            self.session.commit(verified)
        self.clock.lap()


class TimedLasting(CapturableDraft):
    """The same for a session whose passes are captured."""

    def __init__(self, session: CapturableDraft, clock: Clock) -> None:
        self.session, self.clock = session, clock

    def draft(self, request: DraftRequest) -> DraftTree:
        with self.clock.span("draft"):
            return self.session.draft(request)

    def commit(self, verified: VerifiedStep) -> None:
        with self.clock.span("commit"):
            self.session.commit(verified)

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        return self.session.restart(prompts, prefill)

    def prepare(self, config: PassConfig) -> Hashable | None:
        return self.session.prepare(config)

    def sync(self, counts: tuple[int, ...]) -> None:
        self.clock.lap()
        self.session.sync(counts)
