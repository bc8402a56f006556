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


def parity_fixture(folder: str, write: Callable[[Path], Any]) -> Any:
    """A fixture of the checkpoint that `write` writes into a folder; it returns a state dict or a model."""

    @pytest.fixture(scope="session")
    def case(root: Path) -> ParityCase:
        reference = write(root / folder)
        return ParityCase(root / folder, reference, load(root / folder))

    return case


def llamagen_fixture(kind: str) -> Any:
    @pytest.fixture(scope="session")
    def case(root: Path) -> ParityCase:
        path, state = checkpoint_writers.write_llamagen(root / kind, kind)
        return ParityCase(path, state, load(path))

    return case


anole = parity_fixture("anole", checkpoint_writers.write_anole)
lumina = parity_fixture("lumina/Lumina-mGPT-tiny-128", checkpoint_writers.write_lumina)
t2i, c2i = llamagen_fixture("t2i"), llamagen_fixture("c2i")
converted = parity_fixture("converted/LlamaGen-T2I", checkpoint_writers.write_llamagen_converted)
janus = parity_fixture("janus", checkpoint_writers.write_janus)
glm_image = parity_fixture("glm_image", newer_checkpoint_writers.write_glm_image)
simplear = parity_fixture("simplear/SimpleAR-tiny", newer_checkpoint_writers.write_simplear)
lumina2 = parity_fixture("lumina2/Lumina-mGPT-2.0", newer_checkpoint_writers.write_lumina2)
emu3 = parity_fixture("emu3", checkpoint_writers.write_emu3)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An empty Hugging Face hub."""
    return FakeHub(tmp_path / "hub").install(monkeypatch)
