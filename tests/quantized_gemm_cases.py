"""Cases of the quantised GEMM, compared with the product of the dequantised matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from underdraw.kernels.quantized_gemm import (
    _FP8_PLANES,
    _INT4_PLANES,
    _INT8_PLANES,
    QuantizedTile,
    quantized_gemm,
)
from underdraw.nn.quantized_weight import QuantizedFormat, QuantizedWeight, group_size, plane_width, quantize

SHAPES = ((32, 1536), (40, 640), (48, 96))  # outputs and inputs: several segments, groups that do not fill a block
TILES = (None, QuantizedTile(16, 16, 4, 2), QuantizedTile(16, 64, 4, 3, weight_first=True))


def arguments(weight: QuantizedWeight) -> tuple[Any, ...]:
    """The arguments of `quantized_gemm` that describe a weight."""
    words = weight.to_words()
    return words.values, words.scale, weight.format, plane_width(weight.inputs), group_size(weight.inputs)


def check_assembly() -> None:
    """The PTX of every format and plane, emulated for all values of a word's bytes, gives the values of PyTorch."""
    codes = np.arange(256, dtype=np.uint32)
    words = codes[:, None] | codes[None, :] << 8  # all words of 16 bits
    pairs = words | words.T << 16
    fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    is_number = ~np.isnan(fp8)
    for name, planes in (("int8", _INT8_PLANES), ("fp8", _FP8_PLANES), ("int4", _INT4_PLANES)):
        for plane, assembly in enumerate(planes.value):
            low, high = _emulate(assembly, pairs)
            for value, word in ((low, words), (high, words.T)):
                code = word >> 8 * plane & 255 if name != "int4" else word >> 4 * plane & 15
                table = {"int8": np.arange(256).astype(np.int8).astype(np.float32), "fp8": fp8}
                expected = code.astype(np.float32) - 8 if name == "int4" else table[name][code]
                checked = is_number[code] if name == "fp8" else np.ones_like(code, bool)
                assert np.array_equal(value[checked], expected[checked]), (name, plane)


def _emulate(assembly: str, word: Any) -> tuple[Any, Any]:
    """Run the PTX on registers of 32 bits; returns both bfloat16 halves of the result as float32."""
    registers: dict[str, Any] = {"$1": word}

    def read(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    def halves(value: Any) -> tuple[Any, Any]:
        bits = np.broadcast_to(value, word.shape).astype(np.uint32)
        return (bits << 16).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)

    for line in assembly.strip("{} \n").replace(";", "\n").splitlines():
        operation, _, rest = line.strip().partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if operation == "fma.rn.bf16x2":
            a, b, c = (halves(read(name)) for name in names[1:])
            return a[0] * b[0] + c[0], a[1] * b[1] + c[1]
        if operation == "lop3.b32":
            assert names[4] == "0xea"
            registers[names[0]] = read(names[1]) & read(names[2]) | read(names[3])
        elif operation in ("mov.b32", "and.b32", "shl.b32", "shr.b32"):
            values = [read(name) for name in names[1:]]
            results = {"mov": values[0], "and": values[0] & values[-1]}
            results |= {"shl": values[0] << values[-1], "shr": values[0] >> values[-1]} if "sh" in operation else {}
            registers[names[0]] = results[operation[:3]]
        else:
            assert operation in (".reg", ""), operation
    raise AssertionError("no result")


def check_quantized_gemm(
    weight_format: QuantizedFormat,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
    multiply: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Plain, with a residual, and gated, in every tile; or by `multiply(x, weight, gated=, residual=)`."""
    generator = torch.Generator().manual_seed(rows)
    for outputs, inputs in SHAPES:
        matrix = torch.randn(2 * outputs, inputs, generator=generator) * inputs**-0.5
        x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
        residual = torch.randn(rows, 2 * outputs, generator=generator).to(device, dtype)
        weight = quantize(matrix.to(device), weight_format)
        parts, product = arguments(weight), x.double() @ weight.dequantize().double().t()
        gate, up = product.chunk(2, dim=1)
        expected = {
            "plain": product,
            "residual": product + residual.double(),
            "gated": functional.silu(gate) * up,
        }
        for tile in TILES if multiply is None else TILES[:1]:
            product_of = (
                partial(quantized_gemm, x, *parts, tile=tile) if multiply is None else partial(multiply, x, weight)
            )
            results = {
                "plain": product_of(),
                "residual": product_of(residual=residual),
                "gated": product_of(gated=True),
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
    """The bits of a row do not depend on the number of rows, nor those of a gated row with a residual."""
    generator = torch.Generator().manual_seed(outputs)
    matrix = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(device)
    parts = arguments(quantize(matrix, weight_format))
    x = torch.randn(max(counts), inputs, generator=generator).to(device, dtype)
    together, gated = quantized_gemm(x, *parts), quantized_gemm(x, *parts, gated=True)
    for count in counts:
        assert torch.equal(quantized_gemm(x[:count], *parts), together[:count]), (weight_format, count)
        assert torch.equal(quantized_gemm(x[:count], *parts, gated=True), gated[:count]), (weight_format, count)
