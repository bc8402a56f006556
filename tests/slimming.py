"""A layer of few nodes by `nn.slim`, beside the same layer as it is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from underdraw.nn import regions, slim
from underdraw.nn.rope import Rope, turned
from underdraw.nn.transformer import Arch, Block, RMSNorm, Transformer

ARCHES: tuple[dict[str, Any], ...] = (
    {"qk_norm": "layer", "qk_norm_heads": "per_head"},
    {"qk_norm": "rms", "kv_heads": 2},
    {"norm": "pre_skip_first", "kv_heads": 1},
    {"head_dim": 24, "ffn": 300},
)


def check(options: dict[str, Any], pairing: Any, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Enter, between and leave of two layers, over two rows of three nodes, into slots of caches of 40."""
    width = options.get("head_dim", 16)
    rope = Rope.one_axis(width, pairing=pairing)
    net = Transformer(Arch(**{"dim": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 8, "rope": rope, **options}))
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    net = net.to(device, dtype).requires_grad_(False)
    for name, value in net.named_parameters():
        value.copy_(normal(*value.shape) * (value.shape[-1] ** -0.5 if "norm" not in name else 1))
    rows, count, groups = 2, 3, net.arch.groups
    x, attended = normal(rows, count, 64), normal(rows, count, 4 * width)
    rotation = rope.prompt(9, device)[torch.tensor([[3, 4, 4], [5, 6, 7]])]
    turn = turned(rope.factors(rotation, dtype))
    slots = torch.randperm(rows * groups * 40, generator=generator)[: rows * count * groups].view(rows, count, -1)
    slots = slots.to(device)
    first, second = net.blocks
    assert isinstance(net.norm, RMSNorm)
    answers = []
    whole = slim.placing(Block.heads, regions.joined)
    for way in (regions.PLAIN, slim.REGIONS, whole):
        caches = [torch.zeros(rows * groups * 40, width, device=device, dtype=dtype) for _ in range(4)]
        q = way.enter(first, x, turn, *caches[:2], slots)
        between = way.between(first, second, x, attended, turn, *caches[2:], slots)
        answers.append([q, *between, way.leave(second, net.norm, x, attended), *caches])
    for expected, *others in zip(*answers, strict=True):
        for found in others:
            assert expected.shape == found.shape and expected.abs().sum() > 0
            assert (expected.float() - found.float()).abs().max() <= tolerance * expected.float().abs().max()
