"""Products on a CPU: the bits of a row do not depend on the other rows, however the matrix is stored."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from underdraw.nn import linear as linear_layers
from underdraw.nn import onednn
from underdraw.nn.linear import Linear, PackedLinear, pack_weights, to_input_major
from underdraw.nn.row_invariant import linear

ROW_COUNTS = (1, 2, 3, 5, 7, 16, 21, 33, 64, 121, 128)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 128), (512, 1536), (512, 4096), (688, 256), (770, 36), (1408, 512)]
)
def test_linear_is_row_invariant(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and torch.get_num_threads() > 2:
        pytest.skip("without bf16 instructions, bf16 GEMMs on more threads are not row-invariant")
    layer = Linear(inputs, outputs, bias=True, dtype=dtype).requires_grad_(False)
    to_input_major(layer)
    x = torch.randn(200, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        all_rows = layer(x)
        expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert torch.allclose(all_rows.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.03)
        for count in ROW_COUNTS:
            assert torch.equal(layer(x[:count]), all_rows[:count]), count
            assert torch.equal(layer(x[-count:]), all_rows[-count:]), count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 128), (512, 1536), (512, 2816), (688, 256), (770, 64), (1408, 512)]
)
@torch.no_grad()
def test_packed_weights_give_the_bits_of_input_major_ones(
    inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MKL, for any number of rows; the state dict holds the matrix unpacked."""
    monkeypatch.setattr(linear_layers, "prefers_onednn", lambda dtype: False)
    packed, input_major = (PackedLinear(inputs, outputs).requires_grad_(False) for _ in range(2))
    input_major.load_state_dict(packed.state_dict())
    original = packed.weight.clone()
    pack_weights(packed)
    to_input_major(input_major)
    assert packed.weight.shape == (outputs // 32, inputs, 32)
    assert torch.equal(packed.state_dict()["weight"], original)
    x = torch.randn(128, inputs, generator=torch.Generator().manual_seed(0))
    all_rows = input_major(x)
    for count in ROW_COUNTS:
        assert torch.equal(packed(x[:count]), all_rows[:count]), count
    with torch.enable_grad():
        assert torch.allclose(packed(x), all_rows, atol=1e-4)
    pack_weights(packed.to(torch.bfloat16))
    assert packed.weight.shape == (outputs, inputs)


@pytest.mark.usefixtures("threads", "onednn_packs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 128), (512, 1000), (512, 2816), (33, 7), (770, 64), (1408, 512), (4096, 64)]
)
@torch.no_grad()
def test_onednn_packs_are_row_invariant(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """For all numbers of rows up to two products' worth; the state dict holds the matrix unpacked."""
    layer = Linear(inputs, outputs, bias=True, dtype=dtype).requires_grad_(False)
    original = layer.weight.clone()
    pack_weights(layer)
    if not layer.weight.is_mkldnn:
        pytest.skip("oneDNN has no row-invariant kernel for this dtype here")
    assert torch.equal(layer.state_dict()["weight"], original)
    count = 2 * onednn.MAX_ROWS + 1
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    all_rows = layer(x)
    expected = torch.nn.functional.linear(x.double(), original.double(), layer.bias.double())
    assert torch.allclose(all_rows.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.05)
    for rows in range(1, count):
        assert torch.equal(layer(x[:rows]), all_rows[:rows]), rows
        assert torch.equal(layer(x[-rows:]), all_rows[-rows:]), rows
    with torch.enable_grad():
        assert torch.allclose(layer(x), all_rows, atol=1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.usefixtures("onednn_packs")
@torch.no_grad()
def test_packed_layers_are_copied_cast_and_loaded() -> None:
    layer = Linear(96, 40).requires_grad_(False)
    original = layer.weight.clone()
    pack_weights(layer)
    assert layer.weight.is_mkldnn and layer.weight.shape == (40, 96)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, original) and torch.equal(other.bias, layer.bias)
    layer.load_state_dict({"weight": 2 * original, "bias": layer.bias})
    assert layer.weight.is_mkldnn and torch.equal(layer.state_dict()["weight"], 2 * original)
    assert torch.equal(layer.double().weight, 2 * original.double())
    to_input_major(layer.float())
    assert not layer.weight.is_mkldnn and torch.equal(layer.weight, 2 * original)


@pytest.mark.usefixtures("onednn_packs")
@torch.no_grad()
def test_packs_are_not_multiplied_where_they_are_not_row_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads may change after weights were packed."""
    layer = Linear(96, 40).requires_grad_(False)
    pack_weights(layer)
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    monkeypatch.setattr(onednn, "is_row_invariant", lambda *shape: False)
    monkeypatch.setattr(onednn, "product", None)
    all_rows = layer(x)
    assert torch.allclose(all_rows, expected, atol=1e-5)
    assert all(torch.equal(layer(x[:count]), all_rows[:count]) for count in ROW_COUNTS[:7])


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (64, 16), (512, 2)])
@torch.no_grad()
def test_small_matrices_of_16_bits_are_row_invariant(inputs: int, outputs: int) -> None:
    """Torch multiplies few of their rows by kernels of its own and many by oneDNN."""
    for seed in (7, 14, 24):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(outputs, inputs, generator=generator).bfloat16().t().contiguous().t()
        x = torch.randn(2000, inputs, generator=generator).bfloat16()
        all_rows = linear(x, weight)
        assert torch.equal(torch.cat([linear(row, weight) for row in x.split(1)]), all_rows)
        assert torch.allclose(all_rows.double(), x.double() @ weight.double().t(), rtol=0.01, atol=0.05)
