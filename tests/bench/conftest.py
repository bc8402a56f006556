"""A very small model and prompts for benchmark tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_checkpoint


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose images are 3 x 3 codes: the smallest with a cell that has neighbours on all sides."""
    return small_checkpoint.write(tmp_path_factory.mktemp("models") / "mini", side=3)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"a red fox {index}\n" for index in range(40)))
    return path
