"""Cases of the quantised GEMM, compared with the product of the dequantised matrix."""

from __future__ import annotations

from typing import get_args

import torch
from torch.nn import functional

from underdraw.kernels.quantized_gemm import QuantizedTile, quantized_gemm
from underdraw.nn.quantized_weight import QuantizedFormat, quantize

FORMATS: tuple[QuantizedFormat, ...] = get_args(QuantizedFormat)
SHAPES = ((64, 256), (40, 384), (48, 96))  # outputs and inputs; int4 has an odd number of groups in the others
TILES = (None, QuantizedTile(16, 16, 64, 4, 2), QuantizedTile(16, 64, 128, 4, 3, weight_first=True))


def check_quantized_gemm(
    weight_format: QuantizedFormat, rows: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Plain, with a residual, and gated, in every tile."""
    generator = torch.Generator().manual_seed(rows)
    for outputs, inputs in SHAPES:
        matrix = torch.randn(2 * outputs, inputs, generator=generator) * inputs**-0.5
        weight = quantize(matrix.to(device), weight_format)
        x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
        residual = torch.randn(rows, 2 * outputs, generator=generator).to(device, dtype)
        product = x.double() @ weight.dequantize().double().t()
        gate, up = product.chunk(2, dim=1)
        expected = {
            "plain": product,
            "residual": product + residual.double(),
            "gated": functional.silu(gate) * up,
        }
        parts = weight.values, weight.scale, weight_format
        for tile in TILES:
            results = {
                "plain": quantized_gemm(x, *parts, tile=tile),
                "residual": quantized_gemm(x, *parts, residual=residual, tile=tile),
                "gated": quantized_gemm(x, *parts, gated=True, tile=tile),
            }
            for name, result in results.items():
                error = (result.double() - expected[name]).norm() / expected[name].norm()
                assert error <= tolerance, (weight_format, name, tile, float(error))


def check_rows_alone(
    weight_format: QuantizedFormat,
    outputs: int,
    inputs: int,
    counts: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """The bits of a row do not depend on the number of rows, nor those of a gated row."""
    generator = torch.Generator().manual_seed(outputs)
    weight = quantize((torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(device), weight_format)
    x = torch.randn(max(counts), inputs, generator=generator).to(device, dtype)
    parts = weight.values, weight.scale, weight_format
    together, gated = quantized_gemm(x, *parts), quantized_gemm(x, *parts, gated=True)
    for count in counts:
        assert torch.equal(quantized_gemm(x[:count], *parts), together[:count]), (weight_format, count)
        assert torch.equal(quantized_gemm(x[:count], *parts, gated=True), gated[:count]), (weight_format, count)
