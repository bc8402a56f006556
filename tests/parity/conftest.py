"""Small random checkpoints in every published layout, each written and loaded once per session."""

from __future__ import annotations

from pathlib import Path

import checkpoint_writers
import newer_checkpoint_writers
import pytest
from fake_hub import FakeHub
from parity_cases import ParityCase, load


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def anole(root: Path) -> ParityCase:
    state = checkpoint_writers.write_anole(root / "anole")
    return ParityCase(root / "anole", state, load(root / "anole"))


@pytest.fixture(scope="session")
def lumina(root: Path) -> ParityCase:
    path = root / "lumina" / "Lumina-mGPT-tiny-128"
    state = checkpoint_writers.write_lumina(path)
    return ParityCase(path, state, load(path))


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
    path = root / "converted" / "LlamaGen-T2I"
    state = checkpoint_writers.write_llamagen_converted(path)
    return ParityCase(path, state, load(path))


@pytest.fixture(scope="session")
def janus(root: Path) -> ParityCase:
    model = checkpoint_writers.write_janus(root / "janus")
    return ParityCase(root / "janus", model, load(root / "janus"))


@pytest.fixture(scope="session")
def glm_image(root: Path) -> ParityCase:
    model = newer_checkpoint_writers.write_glm_image(root / "glm_image")
    return ParityCase(root / "glm_image", model, load(root / "glm_image"))


@pytest.fixture(scope="session")
def simplear(root: Path) -> ParityCase:
    model = newer_checkpoint_writers.write_simplear(root / "simplear" / "SimpleAR-tiny")
    return ParityCase(root / "simplear" / "SimpleAR-tiny", model, load(root / "simplear" / "SimpleAR-tiny"))


@pytest.fixture(scope="session")
def lumina2(root: Path) -> ParityCase:
    path = root / "lumina2" / "Lumina-mGPT-2.0"
    states = newer_checkpoint_writers.write_lumina2(path)
    return ParityCase(path, states, load(path))


@pytest.fixture(scope="session")
def emu3(root: Path) -> ParityCase:
    model = checkpoint_writers.write_emu3(root / "emu3")
    return ParityCase(root / "emu3", model, load(root / "emu3"))


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An empty Hugging Face hub."""
    return FakeHub(tmp_path / "hub").install(monkeypatch)
