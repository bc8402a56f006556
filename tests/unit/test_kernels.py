"""Triton kernels, run in Triton's interpreter where triton is installed, compared with torch."""

from __future__ import annotations

from importlib.util import find_spec

import attention_cases
import pytest
import torch
from triton_interpreter import run_interpreted

from underdraw.nn.attention import attention_bias

ATTENTION = """
import torch
from underdraw.kernels import tree_attention as kernel
from attention_cases import CASES, check_attention

for case in CASES:
    check_attention(case, kernel.tree_attention, torch.device("cpu"), torch.float32, 1e-5)
kernel.TAIL_KERNEL = kernel.TailTuning(32, 16, 32, 4)  # of more than 16 queries
check_attention(CASES[2], kernel.tree_attention, torch.device("cpu"), torch.float32, 1e-5)
"""
TOPK = """
import torch
from topk_cases import CASES, check_topk

for case in CASES:
    check_topk(*case, torch.device("cpu"))
"""
FUSED_LAYER = """
import torch
from fused_layer_cases import ARCHES, TILES, check_fused_linear, check_layer_functions

for options in ARCHES:
    for pairing in ("half", "interleaved"):
        for count in (3, 20):
            check_layer_functions(options, pairing, count, torch.device("cpu"), torch.float32, 1e-5)
for tile in TILES:
    for rows in (1, 2, 19):
        check_fused_linear(tile, rows, torch.device("cpu"), torch.float32, 1e-5)
"""
QUANTIZED_GEMM = """
import torch
from quantized_gemm_cases import check_assembly, check_quantized_gemm

check_assembly()
for weight_format in ("int8", "fp8", "int4"):
    for rows in (1, 19):
        check_quantized_gemm(weight_format, rows, torch.device("cpu"), torch.float32, 1e-5)
"""
JACOBI = """
import torch
from jacobi_kernel_cases import GROWN, check_compact, check_trunk_tree

check_compact(torch.float32, torch.device("cpu"))
for case in GROWN:
    check_trunk_tree(case, torch.device("cpu"))
"""


@pytest.mark.parametrize("case", attention_cases.CASES, ids=str)
def test_attention_bias_shows_committed_slots_and_ancestors(case: attention_cases.Case) -> None:
    ancestors, mask = case.trees()
    slots, always_never = torch.arange(1, case.length + 1), torch.tensor([True, False])
    seen_masked = torch.tensor([0.0, -torch.inf])
    bias = attention_bias(ancestors, torch.tensor(case.committed), slots, always_never, seen_masked)
    assert torch.equal(bias, torch.where(mask, 0.0, -torch.inf))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "program",
    [ATTENTION, TOPK, FUSED_LAYER, QUANTIZED_GEMM, JACOBI],
    ids=["attention", "topk", "fused-layer", "quantized-gemm", "jacobi"],
)
def test_kernels_match_torch(program: str) -> None:
    run_interpreted(program)
