"""A method: which parts draft and judge, under the name that a table gives it. Knows no model and no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from underdraw.errors import ConfigError

PLAIN = "AR"  # the name of plain autoregression, which every run holds


@dataclass(frozen=True, slots=True)
class Method:
    """One row of a table: specifications of the parts, as on the command line."""

    name: str
    tree: str
    verifier: str = "exact"
    drafter: str = "auto"  # "trained": the model's own even where auto is another, as far as it has one
    proposal: str = "auto"
    about: str = ""  # what the row stands for, for readers

    def record(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Preset:
    """An experiment: what it asks, and what it compares with plain autoregression."""

    name: str
    question: str
    methods: tuple[Method, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int | None = None  # how many are enough; None is all that are given
    drafter: Literal["trained", "any"] = "trained"  # "any": what a model without a drafter falls back to will do


AR = Method(PLAIN, tree="none", drafter="forced", about="plain autoregression, one token a pass")


def grid(
    trees: Sequence[str], verifiers: Sequence[str], drafters: Sequence[str], proposals: Sequence[str]
) -> tuple[Method, ...]:
    """Every combination of parts, named by those of them that differ."""
    sides = (trees, verifiers, drafters, proposals)
    made = []
    for parts in itertools.product(*sides):
        told = [part for part, side in zip(parts, sides, strict=True) if len(side) > 1]
        made.append(Method(" ".join(told) or parts[0], *parts))
    return tuple(made)


def check_names(methods: Sequence[Method]) -> None:
    """Refuse two rows of one name, and a second row of plain autoregression."""
    names = [method.name for method in methods]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{twice[0]!r} is asked for twice; every method of a run needs a name of its own.")
