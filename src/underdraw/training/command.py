"""What the training commands share: their common options, and one sentence with exit code 2 for a user's mistake."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from underdraw.errors import UnderdrawError


class Options(Protocol):
    """Options that every trainer has: seconds in all, at which to pause, between two reports, and so on."""

    @property
    def seconds(self) -> float: ...
    @property
    def pause(self) -> float: ...
    @property
    def batch(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def report_every(self) -> float: ...
    @property
    def seed(self) -> int: ...


def part_parser(part: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `underdraw train PART`; the first line of a module's docstring describes it."""
    first = (description or "").split("\n")[0].split(":")[0]
    return argparse.ArgumentParser(prog=f"underdraw train {part}", description=f"{first}.")


def trainer_parser(
    part: str, description: str | None, defaults: Options, *, pack: str | None = None
) -> argparse.ArgumentParser:
    """A parser with the options of every trainer; the pack is required unless `pack` says what else it is for."""
    parser = part_parser(part, description)
    parser.add_argument("--pack", type=Path, required=pack is None, help=pack or "training pack")
    parser.add_argument("--out", type=Path, required=True, help="folder; continued if it holds weights")
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--pause", type=float, default=defaults.pause, help="stop at so many seconds, to go on later")
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--report-every", type=float, default=defaults.report_every, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser


def run(main: Callable[[], None]) -> None:
    """Run a command; what the user can mend becomes one sentence on standard error."""
    try:
        main()
    except (UnderdrawError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
