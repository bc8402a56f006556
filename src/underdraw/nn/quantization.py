"""Which matrices of a decoder are quantised, and how they are replaced.

The four matrices of every layer: QKV, attention output, gate-up and down, 97 % of a 7B. Norms, embeddings and the LM
head stay in the model's dtype: a pass reads a few rows of the embedding, and the head cut to image codes is small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from underdraw.nn.linear import PackedLinear, QuantizedLinear
from underdraw.nn.quantized_weight import (
    QuantizedFormat,
    QuantizedWeight,
    WeightFormat,
    can_quantize,
    is_quantized,
    storage_shapes,
)
from underdraw.nn.transformer import Arch, DecoderLayer, Transformer


def _quantizable(net: nn.Module) -> Iterator[tuple[str, DecoderLayer, str, PackedLinear]]:
    """(name of the matrix, its layer, its attribute, its module) of the matrices that may be quantised."""
    for prefix, layer in net.named_modules():
        if isinstance(layer, DecoderLayer):
            for attribute in ("qkv", "out", "gate_up", "down"):
                linear = getattr(layer, attribute)
                if isinstance(linear, PackedLinear) and can_quantize(linear.in_features):
                    yield f"{prefix}.{attribute}.weight", layer, attribute, linear


def make_quantized(net: nn.Module, weight_format: QuantizedFormat) -> None:
    """Replace the matrices of a decoder's layers by empty quantised ones; their weights are lost."""
    for _, layer, attribute, linear in list(_quantizable(net)):
        with linear.weight.device:
            setattr(layer, attribute, QuantizedLinear(linear.in_features, linear.out_features, weight_format))


def quantize_decoder(
    net: nn.Module, weight_format: QuantizedFormat, stored: Mapping[str, QuantizedWeight] | None = None
) -> None:
    """Quantise a loaded decoder in place; matrices in `stored` of the same format are used as they are."""
    for name, layer, attribute, linear in list(_quantizable(net)):
        quantized = QuantizedLinear(linear.in_features, linear.out_features, weight_format)
        weight = (stored or {}).get(name)
        is_stored = weight is not None and weight.format == weight_format
        quantized.fill(slice(None), weight if weight is not None and is_stored else linear.weight)
        quantized.sources[name] = slice(None)
        setattr(layer, attribute, quantized)


def quantized_linears(net: nn.Module) -> list[QuantizedLinear]:
    return [module for module in net.modules() if isinstance(module, QuantizedLinear)]


def weight_format_of(net: nn.Module) -> WeightFormat:
    """The format of a decoder's quantised matrices, or `full`."""
    return next((linear.format for linear in quantized_linears(net)), "full")


def decoder_bytes(arch: Arch, weight_format: WeightFormat, dtype: torch.dtype) -> int:
    """Bytes of a decoder's weights."""
    with torch.device("meta"):
        net = Transformer(arch).to(dtype)
    total = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    if is_quantized(weight_format):
        for *_, linear in _quantizable(net):
            outputs, inputs = linear.out_features, linear.in_features
            values, scale = (torch.Size(shape) for shape in storage_shapes(outputs, inputs, weight_format))
            total += values.numel() + 4 * scale.numel() - outputs * inputs * dtype.itemsize
    return total
