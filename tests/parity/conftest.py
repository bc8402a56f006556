"""Small random checkpoints in every published layout, each written and loaded once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_writers
import newer_checkpoint_writers
import pytest
from fake_hub import FakeHub
from parity_cases import ParityCase, load


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def write_and_load(folder: Path, write: Callable[[Path], Any]) -> ParityCase:
    """`write` returns the reference: a state dict, or a model of transformers."""
    reference = write(folder)
    return ParityCase(folder, reference, load(folder))


@pytest.fixture(scope="session")
def anole(root: Path) -> ParityCase:
    return write_and_load(root / "anole", checkpoint_writers.write_anole)


@pytest.fixture(scope="session")
def lumina(root: Path) -> ParityCase:
    return write_and_load(root / "lumina" / "Lumina-mGPT-tiny-128", checkpoint_writers.write_lumina)


@pytest.fixture(scope="session")
def t2i(root: Path) -> ParityCase:
    path, state = checkpoint_writers.write_llamagen(root / "t2i", "t2i")
    return ParityCase(path, state, load(path))


@pytest.fixture(scope="session")
def c2i(root: Path) -> ParityCase:
    path, state = checkpoint_writers.write_llamagen(root / "c2i", "c2i")
    return ParityCase(path, state, load(path))


@pytest.fixture(scope="session")
def converted(root: Path) -> ParityCase:
    return write_and_load(root / "converted" / "LlamaGen-T2I", checkpoint_writers.write_llamagen_converted)


@pytest.fixture(scope="session")
def janus(root: Path) -> ParityCase:
    return write_and_load(root / "janus", checkpoint_writers.write_janus)


@pytest.fixture(scope="session")
def glm_image(root: Path) -> ParityCase:
    return write_and_load(root / "glm_image", newer_checkpoint_writers.write_glm_image)


@pytest.fixture(scope="session")
def simplear(root: Path) -> ParityCase:
    return write_and_load(root / "simplear" / "SimpleAR-tiny", newer_checkpoint_writers.write_simplear)


@pytest.fixture(scope="session")
def lumina2(root: Path) -> ParityCase:
    return write_and_load(root / "lumina2" / "Lumina-mGPT-2.0", newer_checkpoint_writers.write_lumina2)


@pytest.fixture(scope="session")
def emu3(root: Path) -> ParityCase:
    return write_and_load(root / "emu3", checkpoint_writers.write_emu3)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An empty Hugging Face hub."""
    return FakeHub(tmp_path / "hub").install(monkeypatch)
