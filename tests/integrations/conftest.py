"""Small random models of transformers, each written once per session."""

from __future__ import annotations

from typing import Any

import checkpoint_writers
import newer_checkpoint_writers
import pytest


@pytest.fixture(scope="session")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoint_writers.write_janus(tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="session")
def emu3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoint_writers.write_emu3(tmp_path_factory.mktemp("emu3"))


@pytest.fixture(scope="session")
def glm_image(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return newer_checkpoint_writers.write_glm_image(tmp_path_factory.mktemp("glm"))
