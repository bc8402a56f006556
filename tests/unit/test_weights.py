"""Weights on disk: int8 rows, shards, and incomplete files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from underdraw.errors import CheckpointError
from underdraw.nn import weights
from underdraw.nn.quantized_weight import quantize
from underdraw.nn.weights import load_weights, save_weights


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(80, 64, generator=generator) * torch.logspace(-3, 1, 80)[:, None],
        "kernel": torch.randn(64, 16, 3, 3, generator=generator),
        "small": torch.randn(4, 4, generator=generator),
        "vector": torch.randn(100, generator=generator),
    }


def test_every_row_has_its_own_scale() -> None:
    """The error is at most half a 127th of the row's largest value."""
    weight = state()["matrix"]
    error = (quantize(weight, "int8").dequantize() - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) / 254 * 1.001).all()


def test_int8_round_trip(tmp_path: Path) -> None:
    save_weights(tmp_path, state(), {"kind": "test", "size": [1, 2]}, "int8")
    loaded, about = load_weights(tmp_path)
    assert about == {"kind": "test", "size": [1, 2]}
    for name, value in state().items():
        expected = value.bfloat16().float()
        if name in ("matrix", "kernel"):
            expected = quantize(value.flatten(1), "int8").dequantize().reshape(value.shape)
        assert torch.equal(loaded[name], expected), name


def test_a_missing_shard_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 6000)
    paths = save_weights(tmp_path, state(), {}, "bf16")
    assert len(paths) > 1
    assert set(load_weights(tmp_path)[0]) == set(state())
    paths[-1].unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        load_weights(tmp_path)


def test_saving_removes_the_shards_of_an_earlier_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 6000)
    save_weights(tmp_path, state(), {}, "bf16")
    monkeypatch.setattr(weights, "SHARD_BYTES", 10**9)
    save_weights(tmp_path, state(), {"second": True}, "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["model-0.safetensors"]
    assert load_weights(tmp_path)[1] == {"second": True}
