"""What every hostile case must keep: exit code 0 or 2, one line on stderr, no traceback, no file not asked for."""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commands import Result, call

from underdraw.errors import UnderdrawError

MAX_SECONDS = 60.0  # of one command, on a machine that does other things too
MAX_GROWTH = 2**31  # bytes of the peak of memory over all cases of a test


def snapshot(folder: Path) -> dict[str, str]:
    """What a folder holds: every path with a digest of its content, or what kind of file it is."""
    contents = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root) / name
            mode = path.lstat().st_mode
            content = stat.filemode(mode)
            if stat.S_ISREG(mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(mode):
                content = os.readlink(path)
            contents[str(path.relative_to(folder))] = content
    return contents


def run_hostile(*arguments: object, context: object = "") -> Result:
    """Run a command in this process; a traceback would end the test here."""
    start = time.perf_counter()
    try:
        done = call(*arguments)
    except BaseException as error:  # also SystemExit, which no command may raise
        raise AssertionError(f"{context}: {arguments} raised {error!r}") from error
    assert done.code in (0, 2) or (done.code == 1 and arguments[0] == "verify"), (context, arguments, done)
    assert "Traceback" not in done.err + done.out, (context, arguments, done)
    errors = [line for line in done.err.split("\n") if line.startswith("error: ")]
    assert len(errors) == (done.code == 2), (context, arguments, done)
    if done.code == 2:
        assert done.err.endswith(f"{errors[0]}\n") and len(errors[0]) < 2000, (context, arguments, done)
    assert time.perf_counter() - start < MAX_SECONDS, (context, arguments)
    return done


def refusal(action: Callable[[], object], context: str) -> str | None:
    """The message with which underdraw refuses a call; None: it did not. Any other error fails the test."""
    try:
        action()
    except UnderdrawError as error:
        return str(error)
    except BaseException as error:
        raise AssertionError(f"{context} raised {error!r}") from error
    return None


def run_cases(count: int, check: Callable[[int], object]) -> list[Any]:
    """The results of the cases 0 to count - 1; all that fail are listed."""
    results, failures = [], []
    for index in range(count):
        try:
            results.append(check(index))
        except AssertionError as error:
            failures.append(f"{index}: {str(error)[:1500]}")
    assert not failures, f"{len(failures)} of {count} cases failed:\n" + "\n\n".join(failures)
    return results


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail if the peak of memory grows much inside."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert growth < MAX_GROWTH, f"the peak of memory grew by {growth / 2**20:.0f} MiB"
