"""Why the matrix holds: on a CPU a node's bits do not depend on how many others are computed beside it.

Invariant 4 is here too: after a commit the cache is contiguous and equals a fresh prefill of the committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import toy

from underdraw.drafters.small_model import SmallModel
from underdraw.layout import Layout
from underdraw.nn import row_invariant as rounding
from underdraw.nn.attention import AttentionMask, attend_cpu, windows
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.rope import Rope
from underdraw.nn.row_invariant import (
    Linear,
    PackedLinear,
    RowInvariance,
    block,
    input_major,
    pack_weights,
    padded_rows,
)
from underdraw.nn.target import DecoderSession, DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.plan import MAX_NODES
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.confidence import Confidence
from underdraw.protocols import Prompt
from underdraw.registry import policies
from underdraw.tree import ancestor_mask


@pytest.fixture(params=[1, 2, 3], ids=["one-thread", "two-threads", "three-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 128), (512, 1536), (512, 4096), (688, 256), (1408, 512)])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and torch.get_num_threads() > 2:
        pytest.skip("without bf16 units, more threads round bf16 products by the number of rows")
    layer = Linear(inputs, outputs, bias=True, dtype=dtype).requires_grad_(False)
    input_major(layer)
    x = torch.randn(200, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        everything = layer(x)
        expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert torch.allclose(everything.double(), expected, atol=1e-4 if dtype == torch.float32 else 0.03)
        for count in (1, 2, 3, 5, 7, 16, 21, 33, 64, 121, 128):
            assert torch.equal(layer(x[:count]), everything[:count]), count
            assert torch.equal(layer(x[-count:]), everything[-count:]), count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 128), (512, 1536), (512, 2816), (688, 256), (1408, 512)])
@torch.no_grad()
def test_panels_give_the_bits_of_input_major_matrices(inputs: int, outputs: int) -> None:
    """For any number of rows; and the state dict holds the matrix as it was."""
    layer, other = (PackedLinear(inputs, outputs).requires_grad_(False) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    before = layer.weight.clone()
    pack_weights(layer)
    input_major(other)
    assert layer.weight.shape == (outputs // 32, inputs, 32)
    assert torch.equal(layer.state_dict()["weight"], before)
    x = torch.randn(128, inputs, generator=torch.Generator().manual_seed(0))
    everything = other(x)
    for count in (1, 2, 3, 5, 7, 16, 21, 33, 64, 121, 128):
        assert torch.equal(layer(x[:count]), everything[:count]), count
    with torch.enable_grad():
        assert torch.allclose(layer(x), everything, atol=1e-4)
    pack_weights(layer.to(torch.bfloat16))
    assert layer.weight.shape == (outputs, inputs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 30])
@pytest.mark.parametrize("heads", [1, 2, 8])
@torch.no_grad()
def test_queries_do_not_depend_on_the_other_queries(heads: int, rows: int) -> None:
    """A query with zeros between what it sees, in the midst of others, against the same one alone, block by block."""
    generator = torch.Generator().manual_seed(0)
    width, size = 16, block(torch.float32, heads)
    committed, nodes = 2 * size - 40, MAX_NODES
    length = 2 * size + nodes
    keys = torch.randn(width, heads, length, generator=generator).movedim(0, 1)
    values = torch.randn(heads, length, width + 1, generator=generator)
    values[..., width] = 1
    queries = torch.randn(1, rows, heads, width, generator=generator)
    path = torch.randperm(nodes, generator=generator)[:rows].sort().values  # the nodes of a chain, others between them
    bias = torch.full((1, rows, length), -torch.inf)
    bias[:, :, :committed] = 0
    depths = torch.zeros(1, nodes, dtype=torch.int64)
    for depth, node in enumerate(path.tolist()):
        bias[:, depth:, committed + node] = 0
        depths[:, node:] = depth
    parts = windows(torch.tensor([committed]), depths, nodes - 1, committed, length, heads, size)
    together = attend_cpu(queries, keys, values, AttentionMask.of(bias, parts, heads, heads))
    chosen = torch.cat([torch.arange(committed), committed + path])
    for row in range(rows):
        end = committed + row + 1
        seen = chosen[:end]
        plain = windows(torch.tensor([end - 1]), depths[:, :1], 0, end - 1, end, heads, size)
        own_bias = torch.zeros(1, 1, end)
        alone = attend_cpu(
            queries[:, row : row + 1],
            keys[:, :, seen],
            values[:, seen],
            AttentionMask.of(own_bias, plain, heads, heads),
        )
        assert torch.equal(alone[0, 0], together[0, row])


@pytest.mark.parametrize("way", [RowInvariance(2, 1, 256), RowInvariance(4, 4, 64), RowInvariance(16, 16, 64)], ids=str)
def test_whatever_a_machine_needs_is_done(way: RowInvariance, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and shorter blocks than this machine needs change nothing about the pictures."""
    here = rounding._tried(torch.get_num_threads())
    if way[:2] < here[:2] or way.block > here.block:
        pytest.skip(f"this machine needs {here}")
    monkeypatch.setattr(rounding, "_tried", lambda threads: way)
    assert padded_rows(1, torch.float32) == way.fewest
    assert padded_rows(way.fewest + 1, torch.float32) == way.fewest + way.multiple
    assert padded_rows(5, torch.bfloat16) == 8
    of = toy.target(5)
    settings: dict[str, Any] = {"layout": Layout(20, 20, toy.CODES), "seeds": (3,), "guidance": 3.0}
    tokens = toy.run(of, SmallModel(of), Adjacency(nodes=64), **settings)[0]
    assert torch.equal(tokens, toy.plain(of, **settings))


ARCHES = {
    "plain": toy.arch(),
    "grouped": toy.arch(kv_heads=2),
    "layer-qk-norm": toy.arch(qk_norm="layer", qk_norm_heads="per_head"),
    "rms-qk-norm": toy.arch(qk_norm="rms"),
    "post-norm": toy.arch(norm="post"),
    "two-axes-interleaved-zero-prefix": toy.arch(rope=Rope((0, 2, 2), pairing="interleaved", prefix="zero")),
    "three-axes": toy.arch(rope=Rope((2, 1, 1))),
}


@pytest.mark.parametrize("name", ARCHES)
def test_every_architecture_is_exact(name: str) -> None:
    """The settings of the one decoder, against plain decoding of the same weights."""
    of = toy.target(4, ARCHES[name])
    settings: dict[str, Any] = {"layout": toy.ROW_ENDS, "seeds": (1, 2), "guidance": 2.0}
    expected = toy.plain(of, **settings)
    for drafter in (SmallModel(of), toy.eagle(of, above=True)):
        assert torch.equal(toy.run(of, drafter, Confidence(depth=4, top_k=4, nodes=30), **settings)[0], expected)


@pytest.mark.usefixtures("threads")
def test_long_images_cross_blocks_of_keys() -> None:
    """Sums over more than one block of keys, trees that straddle a border, and a prompt of its own length."""
    layout = Layout(20, 20, toy.CODES)
    of = toy.target(5)
    settings: dict[str, Any] = {"layout": layout, "seeds": (3, 4), "guidance": 3.0}
    expected = toy.plain(of, **settings)
    tokens, histories, _ = toy.run(of, SmallModel(of), Adjacency(nodes=64), **settings)
    assert torch.equal(tokens, expected)
    assert histories[0].tokens_per_pass > 5, "long paths are what this is about"


def test_one_head_of_keys_alone_and_in_a_batch() -> None:
    """Threads share the sums of a single head; a picture must not depend on whether others are drawn beside it."""
    of = toy.target(5, toy.arch(kv_heads=1))
    settings: dict[str, Any] = {"layout": Layout(20, 20, toy.CODES), "guidance": 1.0}
    together = toy.plain(of, seeds=(3, 4), **settings)
    assert torch.equal(toy.plain(of, seeds=(3,), **settings), together[:1])
    assert torch.equal(toy.run(of, SmallModel(of), Adjacency(nodes=64), seeds=(3,), **settings)[0], together[:1])


def test_text_features_as_prefix() -> None:
    """A prompt of features through a projection, of a different length in every row."""
    projection = torch.nn.Linear(12, 32).requires_grad_(False)
    of = DecoderTarget(toy.target(6).net, projection=projection)
    generator = torch.Generator().manual_seed(1)
    rows = [Prompt(torch.randn(n, 12, generator=generator), torch.zeros(2, 12)) for n in (3, 7)]
    settings: dict[str, Any] = {"seeds": (5, 6), "guidance": 2.0, "rows": rows}
    assert torch.equal(toy.run(of, toy.eagle(of), Confidence(nodes=20), **settings)[0], toy.plain(of, **settings))


@pytest.mark.parametrize("policy", ["chain", "confidence", "static", "adjacency:init=both"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bf16_is_exact_too(policy: str, temperature: float) -> None:
    of = toy.target(7, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"seeds": (1, 2), "guidance": 2.0, "temperature": temperature}
    assert torch.equal(toy.run(of, SmallModel(of), policies.build(policy), **settings)[0], toy.plain(of, **settings))


def net() -> Transformer:
    module = Transformer(Arch(32, 3, 4, 48, 40, Rope.one_axis(8), kv_heads=2, outputs=toy.CODES)).eval()
    toy.randomise(module, 3)
    input_major(module)
    return module


@torch.no_grad()
def test_the_cache_after_a_commit_is_that_of_a_fresh_prefill() -> None:
    """Random trees and paths, two rows of different length: keys, values and lengths, bit for bit."""
    module = net()
    generator = torch.Generator().manual_seed(2)
    layout, rope = Layout(16, 16, toy.CODES), module.arch.rope

    def cos_sin(steps: torch.Tensor) -> torch.Tensor:
        return rope.cos_sin(rope.raster(layout, steps, torch.zeros(len(steps), dtype=torch.int64)), torch.float32)

    for _ in range(20):
        cache = KVCache(module, 2, 700)
        lengths = torch.randint(1, 600, (2,), generator=generator).tolist()
        tokens = torch.randint(4, 36, (2, 600), generator=generator)

        longest = max(lengths)
        split_cos_sin = cos_sin(torch.arange(longest).expand(2, -1))
        cache.append(module.embed(tokens[:, :longest]), split_cos_sin, torch.tensor(lengths), lengths)
        nodes = int(torch.randint(6, 60, (1,), generator=generator))
        parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))]
        path = [nodes - 1]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        depths = torch.zeros(nodes, dtype=torch.int64)
        for node in range(1, nodes):
            depths[node] = depths[parents[node]] + 1
        tree_tokens = torch.randint(4, 36, (2, nodes), generator=generator)
        places = torch.tensor(lengths)[:, None] + depths
        above = ancestor_mask(torch.tensor([parents]), nodes).expand(2, -1, -1)
        cache.append_nodes(module.embed(tree_tokens), cos_sin(places), depths.expand(2, -1), above)
        count = len(path)
        cache.compact(torch.tensor([path, path]), torch.tensor([count, count]), [count, count])
        for row, length in enumerate(lengths):
            whole = torch.cat([tokens[row, :length], tree_tokens[row, path]])[None]
            fresh = KVCache(module, 1, 700)
            steps = torch.arange(length + count)[None]
            fresh.append(module.embed(whole), cos_sin(steps), torch.tensor([length + count]), [length + count])
            assert cache.host_lengths[row] == length + count == int(cache.length[row])
            assert torch.equal(cache.keys[:, row, :, : length + count], fresh.keys[:, 0, :, : length + count])
            assert torch.equal(cache.values[:, row, :, : length + count], fresh.values[:, 0, :, : length + count])


@torch.no_grad()
def test_the_decoder_equals_a_plain_one() -> None:
    """Stream and attention against whole-sequence causal attention, which shares none of their code."""
    from underdraw.nn.transformer import causal

    module = net()
    tokens = torch.randint(4, 36, (2, 50), generator=torch.Generator().manual_seed(3))
    steps = torch.arange(50).expand(2, 50)
    rotation = module.arch.rope.raster(Layout(16, 16, toy.CODES), steps, torch.zeros(2, dtype=torch.int64))
    cache = KVCache(module, 2, 64)
    cos_sin = module.arch.rope.cos_sin(rotation, torch.float32)
    ours = cache.append(module.embed(tokens), cos_sin, torch.tensor([50, 50]), [50, 50])
    assert torch.allclose(ours, module(module.embed(tokens), rotation, causal), atol=1e-5)


@torch.no_grad()
def test_guidance() -> None:
    """u + s (c - u); at 1 the unconditional row is not even there."""
    of, prompts = toy.target(8), toy.prompts(1)
    cond = DecoderSession(of, prompts, toy.PLAIN, 1.0).prefill.logits
    uncond = DecoderSession(of, [Prompt(prompts[0].unconditional or ())], toy.PLAIN, 1.0).prefill.logits
    apply_guidance = DecoderSession(of, prompts, toy.PLAIN, 3.0).prefill.logits
    assert torch.allclose(apply_guidance, uncond + 3.0 * (cond - uncond), atol=1e-5)
    assert DecoderSession(of, prompts, toy.PLAIN, 1.0).cache.length.shape == (1,)


def test_weights_can_be_loaded_into_panels() -> None:
    """A checkpoint holds plain matrices; a net that is arranged already takes them up and stays arranged."""
    first, second = (toy.target(seed=seed).net for seed in (1, 2))
    for net in (first, second):
        pack_weights(net)
    assert first.blocks[0].qkv.weight.ndim == 3  # type: ignore[union-attr]
    second.load_state_dict(first.state_dict())
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    input_major(second)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
