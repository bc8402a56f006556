"""Samples that several tests train on."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call


@pytest.fixture(scope="session")
def samples(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve samples of six texts from the small model, in six files of two."""
    folder = tmp_path_factory.mktemp("training")
    (folder / "prompts.txt").write_text("a red fox\na blue fox\na fox\nred\nblue\nfox fox\n")
    options = ["--model", small_model, "--prompts", folder / "prompts.txt", "--count", 12, "--batch", 2]
    done = call("train", "samples", *options, "--out", folder / "samples")
    assert done.code == 0, done.err
    return folder / "samples"
