"""The small published checkpoints, each written and loaded once."""

from __future__ import annotations

from pathlib import Path

import along
import published
import pytest
from along import Case


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="session")
def anole(root: Path) -> Case:
    source = published.anole(root / "anole")
    return Case(root / "anole", source, along.load(root / "anole"))


@pytest.fixture(scope="session")
def lumina(root: Path) -> Case:
    source = published.lumina(root / "lumina" / "Lumina-mGPT-tiny-128")
    path = root / "lumina" / "Lumina-mGPT-tiny-128"
    return Case(path, source, along.load(path))


@pytest.fixture(scope="session")
def t2i(root: Path) -> Case:
    path, source = published.llamagen(root / "t2i", "t2i")
    return Case(path, source, along.load(path))


@pytest.fixture(scope="session")
def c2i(root: Path) -> Case:
    path, source = published.llamagen(root / "c2i", "c2i")
    return Case(path, source, along.load(path))


@pytest.fixture(scope="session")
def converted(root: Path) -> Case:
    path = root / "converted" / "LlamaGen-T2I"
    source = published.llamagen_converted(path)
    return Case(path, source, along.load(path))


@pytest.fixture(scope="session")
def janus(root: Path) -> Case:
    source = published.janus(root / "janus")
    return Case(root / "janus", source, along.load(root / "janus"))


@pytest.fixture(scope="session")
def emu3(root: Path) -> Case:
    source = published.emu3(root / "emu3")
    return Case(root / "emu3", source, along.load(root / "emu3"))
