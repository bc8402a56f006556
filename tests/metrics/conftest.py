"""Folders of images that the metrics tests compare."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call

PROMPTS = 40


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """Images of the same prompts: plain, exact (same seeds), other (other seeds), rejection, lantern."""
    root = tmp_path_factory.mktemp("folders")
    prompts = root / "prompts.txt"
    prompts.write_text("".join(f"a red fox {index}\n" for index in range(PROMPTS)))
    common = ["--prompts", prompts, "-m", small_model, "--batch", PROMPTS, "--temperature", 1, "--quiet"]
    tree = "confidence:depth=3,top_k=3,nodes=12"
    options = {
        "plain": ["--tree", "none", "--seed", 1],
        "exact": ["--tree", "chain:depth=2", "--seed", 1],
        "other": ["--tree", "chain:depth=2", "--seed", 1001],
        "rejection": ["--tree", "chain:depth=2", "--verifier", "rejection", "--seed", 2001],
        "lantern": ["--tree", tree, "--verifier", "lantern:delta=0.8,k=100", "--seed", 3001],
    }
    for name, words in options.items():
        assert call("generate", *common, *words, "-o", root / name).code == 0
    return root
