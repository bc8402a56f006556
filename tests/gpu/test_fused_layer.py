"""The fused layer kernels on a GPU, in bfloat16."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("index", range(5))
def test_fused_layer_matches_the_eager_layer(index: int, pairing: Literal["half", "interleaved"]) -> None:
    import fused_layer_cases

    options: dict[str, Any] = fused_layer_cases.ARCHES[index]
    for count in (3, 20):
        fused_layer_cases.check_layer_functions(options, pairing, count, torch.device("cuda"), torch.bfloat16, 3e-2)


@pytest.mark.parametrize("rows", [1, 2, 19])
def test_fused_linear_matches_torch_with_every_tile(rows: int) -> None:
    import fused_layer_cases

    for tile in fused_layer_cases.TILES:
        fused_layer_cases.check_fused_linear(tile, rows, torch.device("cuda"), torch.bfloat16, 3e-2)


def test_a_chain_has_the_bits_of_its_tokens_alone() -> None:
    from underdraw.nn.cached_decoder import CachedDecoder
    from underdraw.nn.fused_layers import FUSED, fused_logits
    from underdraw.nn.rope import Rope
    from underdraw.nn.transformer import Arch, Transformer

    torch.manual_seed(0)
    rope, committed, count = Rope.one_axis(64), 300, 8
    net = Transformer(Arch(256, 3, 4, 512, 64, rope, qk_norm="rms")).to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, committed + count, 256, device="cuda", dtype=torch.bfloat16)
    rotation = rope.prompt_rotation(committed + count, x.device)
    cos_sin = rope.cos_sin(rotation, x.dtype).expand(2, -1, -1, -1)

    def prefilled() -> CachedDecoder:
        decoder = CachedDecoder(net, 2, 512)
        counts = torch.full((2,), committed, device="cuda")
        decoder.append(x[:, :committed], cos_sin[:, :committed], counts, [committed, committed])
        decoder.layer_functions, decoder.attention_backend = FUSED, "tree"
        return decoder

    order = torch.arange(count, device="cuda")
    causal = (order[:, None] >= order)[None]
    chain = prefilled().append_nodes(x[:, committed:], cos_sin[:, committed:], order[None], causal)
    decoder, root = prefilled(), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    for node in range(count):
        part = slice(committed + node, committed + node + 1)
        alone = decoder.append_nodes(x[:, part], cos_sin[:, part], root, root[None] == 0)
        decoder.cache.compact(root.expand(2, 1), torch.ones_like(decoder.cache.length), [1, 1])
        assert torch.equal(alone[:, 0], chain[:, node])
        assert torch.equal(fused_logits(net, alone)[:, 0], fused_logits(net, chain)[:, node])
