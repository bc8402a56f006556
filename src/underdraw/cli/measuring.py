"""Progress of commands that measure: a bar or a spinner on a terminal, lines of text on stderr elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def announce(text: str, *, silent: bool) -> None:
    """Say what starts, where no bar or spinner will show it."""
    if not (silent or sys.stderr.isatty()):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def image_counter(text: str, total: int, *, silent: bool) -> Iterator[Any]:
    """A tqdm bar that counts images."""
    from tqdm import tqdm

    announce(f"{text}: {total} images", silent=silent)
    is_hidden = silent or not sys.stderr.isatty()
    with tqdm(total=total, unit="image", desc=text, file=sys.stderr, disable=is_hidden, leave=False) as bar:
        yield bar


@contextmanager
def stages(text: str, *, silent: bool) -> Iterator[Callable[[str], None]]:
    """Show the current stage and the elapsed time; yields the function that names the next stage."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    start = time.perf_counter()
    if silent or not sys.stderr.isatty():

        def print_stage(stage: str) -> None:
            announce(f"{time.perf_counter() - start:6.1f} s: {stage}", silent=silent)

        print_stage(text)
        yield print_stage
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda stage: progress.update(task, description=stage)
