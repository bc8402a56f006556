"""What the user sees while and after something is drawn: a bar in tokens, one closing line, one JSON object."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underdraw.layout import Layout
    from underdraw.output import PipelineOutput, Stats

Callback = Callable[[Any, int, int, dict[str, Any]], None]


def work(layout: Layout) -> int:
    """Tokens of one image that passes draw: all of the raster but the first, which the prompt's own pass draws."""
    return layout.stop - layout.start - 1


@contextmanager
def progress(total: int, *, silent: bool, label: str = "") -> Iterator[Callback]:
    """A bar that counts tokens and shows tokens per pass, on a terminal; gives the callback that feeds it."""
    from tqdm import tqdm

    hidden = silent or not sys.stderr.isatty()
    passes = tokens = 0
    with tqdm(total=total, unit="tok", desc=label or None, file=sys.stderr, disable=hidden, leave=False) as bar:

        def advance(_: Any, __: int, ___: int, known: dict[str, Any]) -> None:
            nonlocal passes, tokens
            passes, tokens = passes + 1, tokens + len(known["step"].tokens)
            bar.set_postfix_str(f"{tokens / passes:.2f} tokens/pass", refresh=False)
            bar.update(len(known["step"].tokens))

        yield advance


def figures(stats: Stats) -> dict[str, Any]:
    """A call's figures for records, rounded to what they are worth."""
    return {key: rounded(value) for key, value in dataclasses.asdict(stats).items()}


def rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def compared(fast: PipelineOutput[Any], plain: PipelineOutput[Any]) -> list[dict[str, Any]]:
    """What speculation was worth for each picture: the same seeds with and without it, each its share of the time."""
    return [
        {
            "plain_seconds": rounded(plain.stats.seconds / len(plain.images)),
            "plain_passes": history.passes,
            "speedup": rounded(plain.stats.seconds / fast.stats.seconds),
            "identical": ours.tobytes() == theirs.tobytes(),
        }
        for ours, theirs, history in zip(fast.images, plain.images, plain.histories, strict=True)
    ]


def sentence(record: dict[str, Any]) -> str:
    """Seconds, passes and tokens per pass and, if it was compared, what plain sampling took."""
    text = (
        f"{record['seconds']:.2f} s, {record['passes']} passes, {record['tokens']} tokens, "
        f"{record['tokens_per_pass']:.2f} tokens per pass"
    )
    if "speedup" in record:
        pixels = "identical pixels" if record["identical"] else "other pixels"
        text += f"; without speculation {record['plain_seconds']:.2f} s, {pixels}: {record['speedup']:.2f}x the speed"
    return text


def close(line: str, record: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """The last line of output."""
    if as_json:
        print(json.dumps(record))
    elif not quiet:
        print(line)
