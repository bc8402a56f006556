"""A server with the small model, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import small_checkpoint
from running_server import RunningServer, run_server

from underdraw import Pipeline


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that reads prompts as long as those of the embedded model."""
    return small_checkpoint.write(tmp_path_factory.mktemp("models") / "served", length=160)


@pytest.fixture(scope="module")
def server(served_model: Path) -> Iterator[RunningServer]:
    pipe = Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=4")
    with run_server(pipe, slots=4, queue=16) as running:
        yield running
