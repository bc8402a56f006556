"""Models, runs and folders that several tests of measuring look at."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_checkpoint
from commands import call

PROMPTS = 40


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose pictures are 3 x 3 codes: the least that has a cell with neighbours on all sides."""
    return small_checkpoint.write(tmp_path_factory.mktemp("models") / "mini", side=3)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"a red fox {i}\n" for i in range(PROMPTS)))
    return path


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, small_model: Path, prompts: Path) -> Path:
    """Folders of pictures of the same prompts: plain, exact (same seeds), other (other seeds), rejection, lantern."""
    here = tmp_path_factory.mktemp("folders")
    common = ["--prompts", prompts, "-m", small_model, "--batch", PROMPTS, "--temperature", 1, "--quiet"]
    tree = ["--tree", "confidence:depth=3,top_k=3,nodes=12"]
    made = {
        "plain": ["--tree", "none", "--seed", 1], "exact": ["--tree", "chain:depth=2", "--seed", 1],
        "other": ["--tree", "chain:depth=2", "--seed", 1001],
        "rejection": ["--tree", "chain:depth=2", "--verifier", "rejection", "--seed", 2001],
        "lantern": [*tree, "--verifier", "lantern:delta=0.8,k=100", "--seed", 3001],
    }  # fmt: skip
    for name, options in made.items():
        assert call("generate", *common, *options, "-o", here / name).code == 0
    return here
