"""Numbers of threads, and how matrices are packed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from underdraw.nn import linear as linear_layers
from underdraw.nn import onednn


@pytest.fixture(params=[1, 2, 3], ids=["one-thread", "two-threads", "three-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def onednn_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix is packed for oneDNN, also small ones and on processors that MKL has fast kernels for."""
    monkeypatch.setattr(linear_layers, "prefers_onednn", lambda dtype: True)
    monkeypatch.setattr(onednn, "_MIN_WEIGHTS", 0)
