"""The small training pack that the tests of the recipe share, and a network that recognises its sprites."""

from __future__ import annotations

import pytest
import sprite_pack
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny import imagenet_features
from recipes.tiny.data import Pack
from recipes.tiny.imagenet_features import ImageNetFeatures
from recipes.tiny.paint import Painter


class PixelFeatures(ImageNetFeatures):
    """Images as 8 x 8 pixels, which is enough to recognise the sprites of the small pack."""

    def __init__(self) -> None:
        pass

    def features(self, pixels: Tensor) -> Tensor:
        return F.normalize(F.adaptive_avg_pool2d(pixels, 8).flatten(1) - 0.5, dim=-1)


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return sprite_pack.write(tmp_path_factory.mktemp("pack") / "pack.bin")


@pytest.fixture(scope="session")
def painter(pack: Pack) -> Painter:
    return Painter(pack, "cpu")


@pytest.fixture
def pixel_features(monkeypatch: pytest.MonkeyPatch) -> ImageNetFeatures:
    """A network without weights, which the scripts use instead of the downloaded one."""
    network = PixelFeatures()
    monkeypatch.setattr(imagenet_features, "load_weights", lambda cache: {})
    monkeypatch.setattr(imagenet_features, "ImageNetFeatures", lambda weights: network)
    return network
