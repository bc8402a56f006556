"""The kernels for few nodes on a device, in the type that they are made for."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("index", range(5))
def test_a_slim_layer_is_the_layer(index: int, pairing: Literal["half", "interleaved"]) -> None:
    import slimming

    options: dict[str, Any] = slimming.ARCHES[index]
    for count in (3, 20):
        slimming.check(options, pairing, count, torch.device("cuda"), torch.bfloat16, 3e-2)


@pytest.mark.parametrize("rows", [1, 2, 19])
def test_products_of_any_shape_are_the_product(rows: int) -> None:
    import slimming

    for shape in slimming.SHAPES:
        slimming.products(shape, rows, torch.device("cuda"), torch.bfloat16, 3e-2)


def test_a_chain_has_the_bits_of_its_tokens_alone() -> None:
    from underdraw.kernels import fused_layer as slim
    from underdraw.nn.kv_cache import KVCache
    from underdraw.nn.rope import Rope
    from underdraw.nn.transformer import Arch, Transformer

    torch.manual_seed(0)
    rope, known, count = Rope.one_axis(64), 300, 8
    net = Transformer(Arch(256, 3, 4, 512, 64, rope, qk_norm="rms")).to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, known + count, 256, device="cuda", dtype=torch.bfloat16)
    cos_sin = rope.cos_sin(rope.prompt(known + count, x.device), x.dtype).expand(2, -1, -1, -1)

    def begun() -> KVCache:
        cache = KVCache(net, 2, 512)
        counts = torch.full((2,), known, device="cuda")
        cache.append(x[:, :known], cos_sin[:, :known], counts, [known, known])
        cache.regions, cache.kernel = slim.REGIONS, "split"
        return cache

    order = torch.arange(count, device="cuda")
    chain = begun().append_nodes(x[:, known:], cos_sin[:, known:], order[None], (order[:, None] >= order)[None])
    cache, root = begun(), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    for node in range(count):
        here = slice(known + node, known + node + 1)
        alone = cache.append_nodes(x[:, here], cos_sin[:, here], root, root[None] == 0)
        cache.compact(root.expand(2, 1), torch.ones_like(cache.length), [1, 1])
        assert torch.equal(alone[:, 0], chain[:, node])
        assert torch.equal(slim.logits(net, alone)[:, 0], slim.logits(net, chain)[:, node])
