"""A layer of few nodes by `nn.slim`, beside the same layer as it is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from underdraw.kernels import fused_layer as slim
from underdraw.nn import layer_functions as regions
from underdraw.nn.rope import Rope, split_cos_sin
from underdraw.nn.transformer import Arch, DecoderLayer, RMSNorm, Transformer

ARCHES: tuple[dict[str, Any], ...] = (
    {"qk_norm": "layer", "qk_norm_heads": "per_head"},
    {"qk_norm": "rms", "kv_heads": 2},
    {"norm": "pre_skip_first", "kv_heads": 1},
    {"head_dim": 24, "ffn": 300},
    {"norm": "post"},
)


SHAPES: tuple[slim.TileConfig, ...] = ((32, 128, 4, 3, 1), (16, 64, 4, 2, 4), (32, 64, 4, 2, 2))


def products(shape: slim.TileConfig, rows: int, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """A product onto a residual, which the next one norms, and that one gated; 40 outputs of 300 inputs."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    x, residual, weight, gates = normal(1, rows, 300), normal(1, rows, 40), normal(40, 300) / 17, normal(48, 40) / 6
    norm = RMSNorm(40, 1e-5).to(device, dtype).requires_grad_(False)
    norm.weight.copy_(normal(40))
    out, scaled = slim.product(x, weight, residual=residual, norm=norm, shape=shape)
    assert scaled is not None
    gated, _ = slim.product(scaled, gates, gated=True, shape=shape)
    expected = torch.nn.functional.linear(x, weight) + residual
    gate, up = torch.nn.functional.linear(norm(expected), gates).chunk(2, dim=-1)
    for found, right in ((out, expected), (gated, torch.nn.functional.silu(gate) * up)):
        assert (found.float() - right.float()).abs().max() <= tolerance * right.float().abs().max()


def check(
    options: dict[str, Any], pairing: Any, count: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Enter, between and leave of two layers, over two rows of so many nodes, into slots of caches of 40."""
    width = options.get("head_dim", 16)
    rope = Rope.one_axis(width, pairing=pairing)
    net = Transformer(Arch(**{"dim": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 8, "rope": rope, **options}))
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    net = net.to(device, dtype).requires_grad_(False)
    for name, value in net.named_parameters():
        value.copy_(normal(*value.shape) * (value.shape[-1] ** -0.5 if "norm" not in name else 1))
    rows, groups = 2, net.arch.groups
    x, attended = normal(rows, count, 64), normal(rows, count, 4 * width)
    rotation = rope.prompt(9, device)[torch.randint(9, (rows, count), generator=generator)]
    turn = split_cos_sin(rope.cos_sin(rotation, dtype))
    slots = torch.randperm(rows * groups * 40, generator=generator)[: rows * count * groups].view(rows, count, -1)
    slots = slots.to(device)
    first, second = net.blocks
    assert isinstance(net.norm, RMSNorm)
    answers = []
    placing = slim.placing(DecoderLayer.heads, regions.joined)
    few = (slim.REGIONS,) if net.arch.norm != "post" else ()  # see `slim.fits`
    for way in (regions.PLAIN, placing, *few):
        caches = [torch.zeros(rows * groups * 40, width, device=device, dtype=dtype) for _ in range(4)]
        q = way.enter(first, x, turn, *caches[:2], slots)
        between = way.between(first, second, x, attended, turn, *caches[2:], slots)
        answers.append([q, *between, way.leave(second, net.norm, x, attended), *caches])
    for expected, *others in zip(*answers, strict=True):
        for found in others:
            assert expected.shape == found.shape and expected.abs().sum() > 0
            assert (expected.float() - found.float()).abs().max() <= tolerance * expected.float().abs().max()
