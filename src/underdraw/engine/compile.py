"""Compiled layer functions: the parts of a decoder layer between attentions, as torch.compile and Triton make them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from underdraw.nn.attention import triton_available
from underdraw.nn.layer_functions import EAGER, LayerFunctions, layer_to_qkv
from underdraw.nn.row_invariant import divides_half_precision, max_inner_size, max_rows, min_rows, row_multiple
from underdraw.nn.transformer import DecoderLayer

_RECOMPILE_LIMIT = 64  # shapes of one function before torch gives up compiling it


@functools.cache
def compiled_layer_functions(backend: str = "inductor", *, tuned: bool = False) -> LayerFunctions:
    """Layer functions compiled for any number of nodes and shared by all layers; few nodes use fused Triton kernels.

    torch caches compiled code on disk. `tuned` also tries kernels for the GEMMs, which takes minutes.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    # Not as decorators where these are defined: importing torch's compiler takes a second.
    for constant in (divides_half_precision, max_inner_size, max_rows, min_rows, row_multiple):
        torch.compiler.assume_constant_result(constant)
    mode = "max-autotune-no-cudagraphs" if tuned else None

    def compiled(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, backend=backend, mode=mode)

    if backend != "inductor" or not triton_available(torch.device("cuda")):
        functions = LayerFunctions(compiled(EAGER.qkv_to_cache), compiled(EAGER.layer_to_layer))
    else:
        from underdraw.nn.fused_layers import FUSED, with_cache_kernel

        functions = with_cache_kernel(compiled(DecoderLayer.project_qkv), compiled(layer_to_qkv))
        functions = replace(functions, few_rows=FUSED)
    return replace(
        functions,
        finish_last_layer=compiled(EAGER.finish_last_layer),
        attention_bias=compiled(EAGER.attention_bias),
        is_compiled=True,
    )
