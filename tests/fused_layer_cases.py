"""Cases of the fused layer kernels, compared with the eager layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.kernels.fused_layer import TileConfig, fused_linear
from underdraw.nn import fused_layers
from underdraw.nn.layer_functions import EAGER, layer_to_qkv
from underdraw.nn.rope import Rope, split_cos_sin
from underdraw.nn.row_invariant_gpu import ROW_INVARIANT
from underdraw.nn.transformer import Arch, DecoderLayer, RMSNorm, Transformer

ARCHES: tuple[dict[str, Any], ...] = (
    {"qk_norm": "layer", "qk_norm_heads": "per_head"},
    {"qk_norm": "rms", "kv_heads": 2},
    {"norm": "pre_skip_first", "kv_heads": 1},
    {"head_dim": 24, "ffn": 300},
    {"norm": "post"},
    {"norm": "sandwich", "qkv_bias": True, "kv_heads": 2},
    {"qkv_bias": True, "kv_heads": 2},
)


TILES = (TileConfig(32, 128, 4, 3, 1), TileConfig(16, 64, 4, 2, 4), TileConfig(32, 64, 4, 2, 2))


def check_fused_linear(tile: TileConfig, rows: int, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """A linear layer with a residual and a deferred norm, then a gated one that reads it; 40 outputs of 300 inputs."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    x, residual, weight, gate_up = normal(1, rows, 300), normal(1, rows, 40), normal(40, 300) / 17, normal(48, 40) / 6
    norm = RMSNorm(40, 1e-5).to(device, dtype).requires_grad_(False)
    norm.weight.copy_(normal(40))
    out, deferred = fused_linear(x, weight, residual=residual, norm_weight=norm.weight, norm_eps=norm.eps, tile=tile)
    assert deferred is not None
    gated, _ = fused_linear(deferred, gate_up, gated=True, tile=tile)
    expected = functional.linear(x, weight) + residual
    gate, up = functional.linear(norm(expected), gate_up).chunk(2, dim=-1)
    for result, reference in ((out, expected), (gated, functional.silu(gate) * up)):
        assert (result.float() - reference.float()).abs().max() <= tolerance * reference.float().abs().max()


def check_layer_functions(
    options: dict[str, Any], pairing: Any, count: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """All layer functions of two layers, over two rows of `count` nodes, with caches of 40 slots."""
    width = options.get("head_dim", 16)
    rope = Rope.one_axis(width, pairing=pairing)
    net = Transformer(Arch(**{"dim": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 8, "rope": rope, **options}))
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    net = net.to(device, dtype).requires_grad_(False)
    for name, value in net.named_parameters():
        value.copy_(normal(*value.shape) * (value.shape[-1] ** -0.5 if "norm" not in name else 1))
    rows, kv_heads = 2, net.arch.num_kv_heads
    x, attended = normal(rows, count, 64), normal(rows, count, 4 * width)
    rotation = rope.prompt_rotation(9, device)[torch.randint(9, (rows, count), generator=generator)]
    cos_sin = split_cos_sin(rope.cos_sin(rotation, dtype))
    slots = torch.randperm(rows * kv_heads * 40, generator=generator)[: rows * count * kv_heads]
    slots = slots.view(rows, count, -1).to(device)
    first, second = net.blocks
    assert isinstance(net.norm, RMSNorm)
    variants = [EAGER, ROW_INVARIANT, fused_layers.with_cache_kernel(DecoderLayer.project_qkv, layer_to_qkv)]
    if net.arch.norm not in ("post", "sandwich"):  # which the fused GEMMs do not support
        variants.append(fused_layers.FUSED)
    results = []
    for functions in variants:
        caches = [torch.zeros(rows * kv_heads * 40, width, device=device, dtype=dtype) for _ in range(4)]
        q = functions.qkv_to_cache(first, x, cos_sin, *caches[:2], slots)
        next_x, next_q = functions.layer_to_layer(first, second, x, attended, cos_sin, *caches[2:], slots)
        features = functions.finish_last_layer(second, net.norm, x, attended)
        results.append([q, next_x, next_q, features, *caches])
    for expected, *others in zip(*results, strict=True):
        for result in others:
            assert expected.shape == result.shape and expected.abs().sum() > 0
            assert (expected.float() - result.float()).abs().max() <= tolerance * expected.float().abs().max()
