"""What users see of a command: a progress bar in tokens, and one line or JSON object at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underdraw.layout import Layout

StepCallback = Callable[[Any, int, int, dict[str, Any]], None]


def drafted_tokens(layout: Layout) -> int:
    """Tokens of one image that target passes generate: all but the first, which is sampled after the prefill."""
    return layout.stop - layout.start - 1


@contextmanager
def progress_bar(total: int, *, silent: bool, label: str = "") -> Iterator[StepCallback]:
    """Show a bar of `total` tokens on a terminal; yields the `callback_on_step_end` that advances it."""
    from tqdm import tqdm

    is_hidden = silent or not sys.stderr.isatty()
    passes = tokens = 0
    with tqdm(total=total, unit="tok", desc=label or None, file=sys.stderr, disable=is_hidden, leave=False) as bar:

        def advance(_pipe: Any, _index: int, _step: int, details: dict[str, Any]) -> None:
            nonlocal passes, tokens
            accepted = len(details["step"].tokens)
            passes, tokens = passes + 1, tokens + accepted
            bar.set_postfix_str(f"{tokens / passes:.2f} tokens/pass", refresh=False)
            bar.update(accepted)

        yield advance


def print_result(line: str, record: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Print the last line of a command: its record as JSON, or the line for people."""
    if as_json:
        print(json.dumps(record))
    elif not quiet:
        print(line)
