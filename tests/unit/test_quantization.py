"""Quantised weights: errors, storage, bits that do not depend on the number of rows, memory and refusals."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.errors import CapacityError, UnderdrawError
from underdraw.models import loading
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import Family, ImageSize, ModelSpec, Placement, SamplingDefaults
from underdraw.models.random_weights import model_shape, random_target
from underdraw.nn.linear import QuantizedLinear, pack_weights
from underdraw.nn.memory import required_bytes
from underdraw.nn.quantization import decoder_bytes, quantize_decoder, quantized_linears, weight_format_of
from underdraw.nn.quantized_weight import QuantizedFormat, QuantizedWeight, quantize
from underdraw.nn.row_invariant import linear

FORMATS: tuple[QuantizedFormat, ...] = get_args(QuantizedFormat)
CPU = torch.device("cpu")


def matrix(outputs: int = 96, inputs: int = 384) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] *= 1000
    return weight


@pytest.mark.parametrize("inputs", [256, 384, 96, 48])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_errors_are_half_a_step(weight_format: QuantizedFormat, inputs: int) -> None:
    weight = matrix(inputs=inputs)
    quantized = quantize(weight, weight_format)
    error = (quantized.dequantize() - weight).abs()
    if weight_format == "fp8":
        largest = weight.abs().amax(1, keepdim=True)
        bound = weight.abs() * 2**-4 + largest * 2**-17  # 3 bits of mantissa, and the smallest subnormal
    elif weight_format == "int8":
        bound = quantized.scale[:, None] / 2
    else:
        group = min(128, inputs & -inputs)
        groups = weight.view(len(weight), -1, group)
        step = groups.abs().amax(-1, keepdim=True) / 7
        nearest = (groups / step.clamp(min=1e-12)).round() * step  # without clipping
        squares = error.view(len(weight), -1, group).square().sum(-1)
        assert bool((squares <= (nearest - groups).square().sum(-1) * 1.001 + 1e-12).all())
        bound = step.expand_as(groups).reshape_as(weight) * 1.75  # at most 7 * 0.225 steps are clipped
    assert bool((error <= bound * 1.001).all())
    assert not quantized.dequantize()[3].any()


@pytest.mark.parametrize("outputs", [96, 40])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_packed_and_stored_matrices_are_the_same(weight_format: QuantizedFormat, outputs: int) -> None:
    quantized = quantize(matrix(outputs), weight_format)
    packed = quantized.pack(outputs // 2)
    assert torch.equal(packed.dequantize().transpose(1, 2).flatten(0, 1), quantized.dequantize())
    words = packed.to_words()
    assert words.values.dtype == torch.int16 and torch.equal(words.unpack().values, quantized.values)
    stored = QuantizedWeight.from_stored(*words.to_stored())
    assert stored.inputs == 384 and stored.format == weight_format
    assert torch.equal(stored.values, quantized.values) and torch.equal(stored.scale, quantized.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [96, 40])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_have_the_same_bits_alone(weight_format: QuantizedFormat, outputs: int, dtype: torch.dtype) -> None:
    layer = QuantizedLinear(384, outputs, weight_format)
    layer.fill(slice(None), matrix(outputs))
    layer.pack()
    x = torch.randn(33, 384, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        together = layer(x)
        for count in (1, 2, 3, 7, 16):
            assert torch.equal(layer(x[:count]), together[:count])
        expected = linear(x.float(), quantize(matrix(outputs), weight_format).dequantize())
    assert (together.float() - expected).norm() <= 1e-2 * expected.norm()


def test_moving_and_casting_keep_bytes_and_scales() -> None:
    layer = QuantizedLinear(384, 96, "int8")
    layer.fill(slice(None), matrix())
    values, scale = layer.values.clone(), layer.scale.clone()
    layer.to(torch.bfloat16)
    assert layer.scale.dtype == torch.float32
    assert torch.equal(layer.values, values) and torch.equal(layer.scale, scale)


def test_rows_are_saved_in_the_order_they_were_filled_in() -> None:
    layer, weight = QuantizedLinear(384, 96, "int8"), matrix()
    layer.fill(slice(0, 32), weight[:32])
    layer.fill(slice(32, 96), weight[32:])
    layer.pack()
    order = torch.randperm(96, generator=torch.Generator().manual_seed(2))
    layer.reorder(order)
    expected = quantize(weight, "int8")
    assert torch.equal(layer.weight.unpack().values, expected.values[order])
    assert torch.equal(layer.rows(slice(32, 96)).values, expected.values[32:])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_quantised_decoder_is_close_and_as_large_as_estimated(weight_format: QuantizedFormat) -> None:
    arch = toy_models.arch(dim=64)
    full = random_target(arch, Placement(CPU, torch.float32)).net
    net = random_target(arch, Placement(CPU, torch.float32, weight_format)).net
    assert len(quantized_linears(net)) == 4 * arch.layers and weight_format_of(net) == weight_format
    size = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    assert size == decoder_bytes(arch, weight_format, torch.float32)
    quantize_decoder(full, weight_format)
    pack_weights(full)
    for one, other in zip(full.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_7b_fits_into_9_and_6_gigabytes() -> None:
    shape = model_shape("anole-7b")
    capacity = shape.layout.stop + shape.prompt_length + 128
    cache_bytes = required_bytes(shape.arch, 2, capacity, shape.prompt_length, 2)
    sizes = {name: decoder_bytes(shape.arch, name, torch.bfloat16) + cache_bytes for name in FORMATS}
    assert sizes["int8"] < 9e9 and sizes["fp8"] < 9e9 and sizes["int4"] < 6e9


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    shape = model_shape("anole-7b")
    spec = ModelSpec(shape.arch, SamplingDefaults(3.0), (ImageSize(512, 512),), lambda _: shape.layout)
    family = Family("test", "", (), lambda _: True, lambda *_: pytest.fail("loaded"), read_spec=lambda _: spec)
    checkpoint = Checkpoint(path=tmp_path, name="a-7b")  # type: ignore[arg-type]
    monkeypatch.setattr(loading, "free_bytes", lambda _: 8 * 2**30)
    monkeypatch.setattr(loading, "detect_family", lambda _: family)
    with pytest.raises(
        CapacityError, match=r"a-7b has 12\.\d GiB of weights in bfloat16 and 8\.0 GiB are free .* int8"
    ):
        loading.load_model(checkpoint, Placement(CPU, torch.bfloat16))
    loading.check_weights_fit(family, checkpoint, Placement(CPU, torch.bfloat16, "int8"))
    monkeypatch.setattr(loading, "free_bytes", lambda _: 2**30)
    with pytest.raises(CapacityError, match="smaller model"):
        loading.check_weights_fit(family, checkpoint, Placement(CPU, torch.bfloat16, "int4"))


def test_unknown_weights_are_refused(tmp_path: object) -> None:
    with pytest.raises(UnderdrawError, match="int3"):
        loading.resolve_weights(Checkpoint(path=tmp_path, name="model"), "int3")  # type: ignore[arg-type]
