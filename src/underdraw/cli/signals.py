"""SIGTERM ends a command as Ctrl-C does: nothing half-written stays behind, and what is finished is reported."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType


class Terminated(KeyboardInterrupt):
    """SIGTERM, which service managers, batch systems and containers send."""


class SigtermHandler:
    """A context manager: inside it SIGTERM raises `Terminated`; afterwards `was_received` says whether it came.

    Handlers of others are left alone, and so are threads: Python delivers signals to the main thread only. A forked
    child, which inherits the handler, ends as it would without it: pools of processes end their workers by SIGTERM.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self.was_received = self._is_installed = False

    def __enter__(self) -> SigtermHandler:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._raise)
            self._is_installed = True
        return self

    def _raise(self, _signal: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.was_received = True
        raise Terminated

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._is_installed = False
