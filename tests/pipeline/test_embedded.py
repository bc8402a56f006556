"""The model that is part of the package: it loads by name, is small and decodes exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import underdraw
from underdraw import Pipeline

PASSES = 30


@pytest.fixture(scope="module")
def tiny() -> Pipeline:
    return Pipeline.from_pretrained()


def first_tokens(pipe: Pipeline, passes: int) -> list[int]:
    """The tokens of the first `passes` passes of an image."""

    def stop(pipe: Pipeline, index: int, step: int, details: dict[str, Any]) -> None:
        if index == passes - 1:
            pipe.interrupt()

    history = pipe("a fox, 3D render, on a sky blue background", seed=3, callback_on_step_end=stop).history
    return [int(token) for token in history.tokens if token >= 0]


def test_loads_by_name(tiny: Pipeline) -> None:
    assert tiny.model.name == "tiny" and str(tiny.model.sizes[0]) == "192x192"
    assert tiny.drafter_name == "jacobi-tree"  # faster than its trained drafter
    assert [path.name for path in tiny.model.drafter_folders] == ["drafter-eagle"]


def test_portraits_are_drawn_without_guidance(tiny: Pipeline) -> None:
    """Their unconditional prompt is the caption itself, unless a call gives a negative prompt."""
    size, portrait = tiny.model.sizes[0], "a person with tan skin and glasses, doodle portrait"
    for text, negative, is_unguided in ((portrait, None, True), (portrait, "", False), ("a fox", None, False)):
        prompt = tiny.model.make_prompt(text, negative, size)
        assert (prompt.unconditional == prompt.condition) == is_unguided


def test_size_of_its_files() -> None:
    files = [path for path in (Path(underdraw.__file__).parent / "assets" / "tiny").rglob("*") if path.is_file()]
    assert 30_000_000 < sum(path.stat().st_size for path in files) <= 48_000_000


@pytest.mark.parametrize(("drafter", "tree"), [("auto", "budget"), ("drafter-eagle", "adjacency")])
def test_speculation_gives_the_same_tokens_in_fewer_passes(drafter: str, tree: str) -> None:
    pipe = Pipeline.from_pretrained(drafter=drafter, tree=tree)
    fast, plain = first_tokens(pipe, PASSES), first_tokens(pipe.plain(), PASSES)
    assert len(plain) == PASSES + 1 and fast[: len(plain)] == plain
    assert len(fast) > 2 * len(plain)


def test_auto_tree_gives_the_same_tokens(tiny: Pipeline) -> None:
    """How many passes it takes depends on what was measured: on a busy machine it may draft nothing."""
    fast, plain = first_tokens(tiny, PASSES), first_tokens(tiny.plain(), PASSES)
    assert tiny.tree_name == "auto" and fast[: len(plain)] == plain
