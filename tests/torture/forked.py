"""Commands in a forked copy of this process: they start at once, can be killed, and their file operations can fail."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw.cli.app import main

KILLED = 137
FAULTS = ("ENOSPC", "EIO", "kill")
OPERATIONS = ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "ftruncate")  # of `os`


class Faults:
    """Counts the operations on files below a folder, and lets one of them fail."""

    def __init__(self, folder: Path, at: int = -1, fault: str = "") -> None:
        self.folder, self.at, self.fault = str(folder), at, fault
        self.count = 0
        self.operations: list[str] = []
        self.descriptors: set[int] = set()

    def step(self, operation: str) -> None:
        """Called before every operation."""
        self.count += 1
        self.operations.append(operation)
        if self.count - 1 != self.at:
            return
        if self.fault == "kill":
            os._exit(KILLED)
        raise OSError(getattr(errno, self.fault), os.strerror(getattr(errno, self.fault)))

    def is_inside(self, target: Any) -> bool:
        if isinstance(target, int):
            return target in self.descriptors
        return os.path.abspath(os.fspath(target)).startswith(self.folder)

    def install(self) -> None:
        """Wrap the operations of this process; there is no way back, so do it in a fork."""
        for name in OPERATIONS:
            setattr(os, name, self._wrap(name, getattr(os, name)))
        real_open = builtins.open

        def faulty_open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not (set(mode) & set("wax+")) or isinstance(file, int) or not self.is_inside(file):
                return real_open(file, mode, *arguments, **options)
            self.step(f"open {os.path.basename(os.fspath(file))}")
            raw = io.FileIO(file, mode.replace("b", ""))
            self.descriptors.add(raw.fileno())
            return FaultyWriter(raw, self)

        builtins.open = faulty_open  # type: ignore[assignment]

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(target: Any, *arguments: Any, **options: Any) -> Any:
            if self.is_inside(target):
                self.step(f"{name} {target if isinstance(target, int) else os.path.basename(os.fspath(target))}")
            result = real(target, *arguments, **options)
            if name == "open" and self.is_inside(target):
                self.descriptors.add(result)
            return result

        return operation


class FaultyWriter(io.BufferedWriter):
    """A file whose writes are counted."""

    def __init__(self, raw: io.FileIO, faults: Faults) -> None:
        super().__init__(raw)
        self.faults = faults

    def write(self, data: Any) -> int:
        self.faults.step("write")
        return super().write(data)


@dataclass(frozen=True)
class Child:
    """A command in another process."""

    pid: int
    log: Path

    def wait(self) -> int:
        """The exit code; -9 for a killed process."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def fork(arguments: tuple[object, ...], log: Path, faults: Faults | None = None, counts: Path | None = None) -> Child:
    """Run a command in a fork; stdout and stderr go to `log`, the operations to `counts`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, log)
    code = 1
    try:  # in the child: nothing of pytest may run
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        if faults is not None:
            faults.install()
        code = main([str(argument) for argument in arguments])
        if counts is not None and faults is not None:
            counts.write_text("\n".join(faults.operations))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
