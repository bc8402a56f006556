"""GEMMs with quantised weights on a GPU: right in every format, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from underdraw.nn.quantized_weight import QuantizedFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
COUNTS = (1, 2, 3, 16, 17, 33, 64, 100, 128, 257)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("weight_format", ["int8", "fp8", "int4"])
def test_products_are_right(weight_format: QuantizedFormat, dtype: torch.dtype) -> None:
    import quantized_gemm_cases

    from underdraw.nn.row_invariant_gpu import _fused

    device, is_float32 = torch.device("cuda"), dtype == torch.float32
    tolerance, multiply = (1e-5, _fused) if is_float32 else (1e-2, None)  # float32 weights are dequantised first
    for rows in (1, 19):
        quantized_gemm_cases.check_quantized_gemm(weight_format, rows, device, dtype, tolerance, multiply)


@pytest.mark.parametrize("shape", [(1280, 1280), (512, 3584), (8192, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("weight_format", ["int8", "fp8", "int4"])
def test_rows_have_the_same_bits_alone(
    weight_format: QuantizedFormat, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    import quantized_gemm_cases

    quantized_gemm_cases.check_rows_alone(weight_format, *shape, COUNTS, torch.device("cuda"), dtype)


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4"])
def test_quantised_decoding_is_exact(weights: QuantizedFormat) -> None:
    """Tokens of plain decoding in a batch, with chains and trees, captured."""
    from underdraw.bench.agreement import load_subject, measure_matrix, settings
    from underdraw.engine.cuda_graphs import make_graph_cache
    from underdraw.models.family import Placement

    device = torch.device("cuda")
    subject = load_subject("random:toy", Placement(device, torch.bfloat16, weights), 4)
    rows = measure_matrix(subject, list(settings((8, 64), (1, 4))), (1.0,), 4, make_graph_cache(device, "auto"))
    assert all(row["pictures_equal"] == row["pictures"] for row in rows), rows


def test_a_loaded_model_holds_words() -> None:
    """Of the embedded family too, whose matrices are quantised on the host: every pass would convert them again."""
    from underdraw import Pipeline
    from underdraw.nn.quantization import quantized_linears

    pipe = Pipeline.from_pretrained("tiny", device="cuda", weights="int8")
    assert {layer.values.dtype for layer in quantized_linears(pipe.model.target.net)} == {torch.int16}
