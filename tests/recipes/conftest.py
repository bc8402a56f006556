"""The small training pack that the tests of the recipe share."""

from __future__ import annotations

import pytest
import sprite_pack

from recipes.tiny.compose import Painter
from recipes.tiny.data import Pack


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return sprite_pack.write(tmp_path_factory.mktemp("pack") / "pack.bin")


@pytest.fixture(scope="session")
def painter(pack: Pack) -> Painter:
    return Painter(pack, "cpu")
