"""Settings and models for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import small_checkpoint
import torch

from underdraw import Pipeline

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured in tests is not remembered for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERDRAW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a very small random model of the tiny family and its drafter; not to be changed."""
    return small_checkpoint.write(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def pipe(small_model: Path) -> Pipeline:
    """A pipeline of the small model with a tree that costs little, new for every test."""
    return Pipeline.from_pretrained(small_model, tree="chain:depth=2")
