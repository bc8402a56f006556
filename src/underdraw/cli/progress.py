"""What users see of a command: progress on a terminal, lines of text elsewhere, one line or JSON object at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underdraw.distributed.planned_images import Event, ModelInfo
    from underdraw.layout import Layout

LOG_SECONDS = 30.0  # between two lines of progress where there is no terminal

StepCallback = Callable[[Any, int, int, dict[str, Any]], None]


def drafted_tokens(layout: Layout) -> int:
    """Tokens of one image that target passes generate: all but the first, which is sampled after the prefill."""
    return layout.stop - layout.start - 1


def open_bar(total: int, unit: str, label: str = "", *, silent: bool) -> Any:
    """A tqdm bar on stderr, hidden where that is no terminal."""
    from tqdm import tqdm

    is_hidden = silent or not sys.stderr.isatty()
    return tqdm(total=total, unit=unit, desc=label or None, file=sys.stderr, disable=is_hidden, leave=False)


@contextmanager
def progress_bar(total: int, *, silent: bool, label: str = "") -> Iterator[StepCallback]:
    """Show a bar of `total` tokens on a terminal; yields the `callback_on_step_end` that advances it."""
    passes = tokens = 0
    with open_bar(total, "tok", label, silent=silent) as bar:

        def advance(_pipe: Any, _index: int, _step: int, details: dict[str, Any]) -> None:
            nonlocal passes, tokens
            accepted = len(details["step"].tokens)
            passes, tokens = passes + 1, tokens + accepted
            bar.set_postfix_str(f"{tokens / passes:.2f} tokens/pass", refresh=False)
            bar.update(accepted)

        yield advance


def counted(count: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_result(line: str, record: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Print the last line of a command: its record as JSON, or the line for people."""
    if as_json:
        print(json.dumps(record))
    elif not quiet:
        print(line)


def announce(text: str, *, silent: bool) -> None:
    """Say what starts, where no bar or spinner will show it."""
    if not (silent or sys.stderr.isatty()):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def image_counter(text: str, total: int, *, silent: bool) -> Iterator[Any]:
    """A tqdm bar that counts images."""
    announce(f"{text}: {counted(total, 'image')}", silent=silent)
    with open_bar(total, "image", text, silent=silent) as bar:
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


class RunProgress:
    """Progress of a run of many images: a bar on a terminal, a line now and then in a log."""

    def __init__(self, *, silent: bool, passes_per_token: int = 1) -> None:
        """`passes_per_token` is 2 where every image is drawn by plain decoding too."""
        self._silent, self._repeats = silent, passes_per_token
        self._bar: Any = None
        self._images = self._missing = self._tokens = self._passes = self._total = 0
        self._started = self._reported = time.monotonic()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, info: ModelInfo, missing: int) -> None:
        """Begin: `missing` images of the model are to be drawn."""
        self._missing = missing
        self._started = self._reported = time.monotonic()
        self._total = info.tokens * missing * self._repeats
        self._bar = open_bar(self._total, "tok", silent=self._silent)

    def update(self, event: Event) -> None:
        """Count what a worker reports."""
        from underdraw.distributed.planned_images import Progress

        if isinstance(event, Progress):
            self._tokens, self._passes = self._tokens + event.tokens, self._passes + event.passes
            self._bar.set_postfix_str(f"{self._images} images, {self._rates()}", refresh=False)
            self._bar.update(event.tokens)
            return
        self._images += 1
        now = time.monotonic()
        if self._bar.disable and not self._silent and now - self._reported > LOG_SECONDS:
            left = max(0, self._total - self._tokens) * (now - self._started) / max(1, self._tokens)
            print(f"{self._images}/{self._missing} images, {self._rates()}, {left / 60:.0f} min left", file=sys.stderr)
            self._reported = now

    def _rates(self) -> str:
        """Images per second and tokens per pass; the latter not where passes of plain decoding are among them."""
        rate = f"{self._images / max(1e-9, time.monotonic() - self._started):.2f} images/s"
        return rate if self._repeats > 1 else f"{rate}, {self._tokens / max(1, self._passes):.2f} tokens/pass"
