"""The kernels for few nodes on a device, in the type that they are made for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("index", range(4))
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


def test_kernels_that_begin_early_find_what_those_before_them_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    from underdraw.engine.graphs import CudaGraph
    from underdraw.nn import slim, split
    from underdraw.nn.rope import Rope, turned
    from underdraw.nn.transformer import Arch, Transformer

    torch.manual_seed(0)
    rope = Rope.one_axis(64)
    net = Transformer(Arch(512, 8, 8, 1024, 64, rope, qk_norm="rms")).to("cuda", torch.bfloat16).requires_grad_(False)
    blocks: list[Any] = list(net.blocks)
    rows, count, known, capacity = 2, 4, 300, 512
    x = torch.randn(rows, count, 512, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, len(blocks), rows, 8, capacity, 64, device="cuda", dtype=torch.bfloat16)
    turn = turned(rope.factors(rope.prompt(known + count, x.device)[known:].expand(rows, -1, -1, -1), x.dtype))
    first = torch.arange(0, rows * 8 * capacity, capacity, device="cuda").view(rows, 1, 8)
    slots = first + known + torch.arange(count, device="cuda")[:, None]
    committed = torch.full((rows,), known, device="cuda")
    ancestors = torch.ones(1, count, count, dtype=torch.bool, device="cuda").tril()
    flat = [(k.flatten(0, 2), v.flatten(0, 2)) for k, v in zip(keys, values, strict=True)]

    def attended(layer: int, q: torch.Tensor) -> torch.Tensor:
        return split.attend_split(q, keys[layer], values[layer], committed, ancestors)

    def work() -> torch.Tensor:
        y, q = x, slim.REGIONS.enter(blocks[0], x, turn, *flat[0], slots)
        for layer, (block, after) in enumerate(pairwise(blocks)):
            y, q = slim.REGIONS.between(block, after, y, attended(layer, q), turn, *flat[layer + 1], slots)
        return slim.REGIONS.leave(blocks[-1], net.norm, y, attended(len(blocks) - 1, q))

    with monkeypatch.context() as patch:
        for module in (slim, split):
            patch.setattr(module, "early", lambda device: {"EARLY": False})
        expected = work().clone()
    assert torch.equal(work(), expected) and expected.isfinite().all()
    graph = CudaGraph(work)
    for _ in range(50):
        for written in (keys, values):
            written[:, :, :, known : known + count] = torch.nan  # must be written before it is read
        graph.replay()
        assert torch.equal(graph.out, expected)


def test_a_chain_has_the_bits_of_its_tokens_alone() -> None:
    from underdraw.nn import slim
    from underdraw.nn.rope import Rope
    from underdraw.nn.stream import Stream
    from underdraw.nn.transformer import Arch, Transformer

    torch.manual_seed(0)
    rope, known, count = Rope.one_axis(64), 300, 8
    net = Transformer(Arch(256, 3, 4, 512, 64, rope, qk_norm="rms")).to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, known + count, 256, device="cuda", dtype=torch.bfloat16)
    factors = rope.factors(rope.prompt(known + count, x.device), x.dtype).expand(2, -1, -1, -1)

    def begun() -> Stream:
        stream = Stream(net, 2, 512)
        counts = torch.full((2,), known, device="cuda")
        stream.extend(x[:, :known], factors[:, :known], counts, [known, known])
        stream.regions, stream.kernel = slim.REGIONS, "split"
        return stream

    order = torch.arange(count, device="cuda")
    chain = begun().branch(x[:, known:], factors[:, known:], order[None], (order[:, None] >= order)[None])
    stream, root = begun(), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    for node in range(count):
        here = slice(known + node, known + node + 1)
        alone = stream.branch(x[:, here], factors[:, here], root, root[None] == 0)
        stream.keep(root.expand(2, 1), torch.ones_like(stream.length), [1, 1])
        assert torch.equal(alone[:, 0], chain[:, node])
        assert torch.equal(slim.logits(net, alone)[:, 0], slim.logits(net, chain)[:, node])
