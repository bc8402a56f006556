"""The model that comes with the package: it loads by its name, and keeps the promise."""

from __future__ import annotations

from typing import Any

import pytest

from underdraw import Pipeline

PASSES = 30


@pytest.fixture(scope="module")
def tiny() -> Pipeline:
    return Pipeline.from_pretrained()


def begun(pipe: Pipeline, passes: int) -> list[int]:
    """The first tokens of a picture: those of so many passes."""

    def stop(pipe: Pipeline, index: int, cell: int, known: dict[str, Any]) -> None:
        if index == passes - 1:
            pipe.interrupt()

    history = pipe("a red fox on a blue background", seed=7, callback_on_step_end=stop).history
    return [int(token) for token in history.tokens if token >= 0]


def test_it_loads_by_its_name(tiny: Pipeline) -> None:
    assert tiny.model.name == "tiny" and str(tiny.model.sizes[0]) == "192x192"
    assert tiny.drafter_name == (tiny.model.drafters[0].name if tiny.model.drafters else "jacobi")


def test_same_seed_same_tokens_and_more_of_them(tiny: Pipeline) -> None:
    fast, plain = begun(tiny, PASSES), begun(tiny.plain(), PASSES)
    assert len(plain) == PASSES + 1 and fast[: len(plain)] == plain
    assert len(fast) > 1.5 * len(plain)
