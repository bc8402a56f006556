"""What exact decoding rests on: on a CPU the bits of a node do not depend on the other nodes of its pass.

Also: after a commit the KV cache is contiguous and equals a fresh prefill of the committed tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_models

from underdraw.drafters.small_model import SmallModel
from underdraw.layout import Layout
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.loading import load_model, resolve_placement
from underdraw.nn import row_invariant
from underdraw.nn.attention import AttentionMask, attend_cpu, slot_blocks, value_columns
from underdraw.nn.cached_decoder import CachedDecoder
from underdraw.nn.linear import pack_weights, to_input_major
from underdraw.nn.rope import Rope
from underdraw.nn.row_invariant import RowInvariance, padded_rows, sum_block
from underdraw.nn.target import DecoderSession, DecoderTarget
from underdraw.nn.transformer import Arch, Transformer, causal_attention
from underdraw.plan import MAX_NODES
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.confidence import Confidence
from underdraw.protocols import Prompt
from underdraw.registry import policies
from underdraw.tree import DraftTree, ancestor_mask, chain


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 30])
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_cpu_attention_is_row_invariant(dtype: torch.dtype, heads: int, rows: int) -> None:
    """Queries of a chain whose nodes have others between them in the cache, against each query alone."""
    generator = torch.Generator().manual_seed(0)
    width, size = 16, sum_block(heads)
    committed, nodes = 2 * size - 40, MAX_NODES
    length = 2 * size + nodes
    keys = torch.randn(width, heads, length, generator=generator).movedim(0, 1).to(dtype)
    values = torch.randn(heads, length, value_columns(width), generator=generator).to(dtype)
    values[..., width] = 1
    queries = torch.randn(1, rows, heads, width, generator=generator).to(dtype)
    path = torch.randperm(nodes, generator=generator)[:rows].sort().values  # the nodes of the chain
    bias = torch.full((1, rows, length), -torch.inf)
    bias[:, :, :committed] = 0
    depths = torch.zeros(1, nodes, dtype=torch.int64)
    for depth, node in enumerate(path.tolist()):
        bias[:, depth:, committed + node] = 0
        depths[:, node:] = depth
    blocks = slot_blocks(torch.tensor([committed]), depths, nodes - 1, committed, length, heads, size)
    together = attend_cpu(queries, keys, values, AttentionMask.for_cpu(bias, blocks, heads, heads))
    chain_slots = torch.cat([torch.arange(committed), committed + path])
    for row in range(rows):
        end = committed + row + 1
        used = -(-end // 64) * 64  # slots, as `KVCache.reserve` rounds them up
        slots = torch.cat([chain_slots[:end], torch.arange(used - end)])
        blocks = slot_blocks(torch.tensor([end - 1]), depths[:, :1], 0, end - 1, used, heads, size)
        bias = torch.zeros(1, 1, used).index_fill_(2, torch.arange(end, used), -torch.inf)
        mask = AttentionMask.for_cpu(bias, blocks, heads, heads)
        alone = attend_cpu(queries[:, row : row + 1], keys[:, :, slots], values[:, slots], mask)
        assert torch.equal(alone[0, 0], together[0, row])


RULES = (
    RowInvariance(2, 1, 256),
    RowInvariance(4, 4, 64),
    RowInvariance(16, 16, 64),
    RowInvariance(4, 4, 64, max_rows=4, column_multiple=16),  # Intel's processors without AVX-512
)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_stricter_rules_draw_the_same_images(rules: RowInvariance, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and shorter blocks than this processor needs."""
    probed = row_invariant._probe(torch.get_num_threads())
    is_laxer = rules[:2] < probed[:2] or rules.sum_block > probed.sum_block
    if is_laxer or rules.max_rows < probed.max_rows or rules.column_multiple < probed.column_multiple:
        pytest.skip(f"this processor needs {probed}")
    monkeypatch.setattr(row_invariant, "_probe", lambda threads: rules)
    assert padded_rows(1, torch.float32) == rules.min_rows
    assert padded_rows(rules.min_rows + 1, torch.float32) == rules.min_rows + rules.row_multiple
    assert padded_rows(5, torch.bfloat16) == 8
    of = toy_models.target(5)
    settings: dict[str, Any] = {"layout": Layout(20, 20, toy_models.CODES), "seeds": (3,), "guidance": 3.0}
    tokens = toy_models.run_decode(of, SmallModel(of), Adjacency(nodes=64), **settings)[0]
    assert torch.equal(tokens, toy_models.plain_tokens(of, **settings))


ARCHES = {
    "plain": toy_models.arch(),
    "grouped": toy_models.arch(kv_heads=2),
    "layer-qk-norm": toy_models.arch(qk_norm="layer", qk_norm_heads="per_head"),
    "rms-qk-norm": toy_models.arch(qk_norm="rms"),
    "post-norm": toy_models.arch(norm="post"),
    "two-axes-interleaved-zero-prompt": toy_models.arch(
        rope=Rope((0, 2, 2), pairing="interleaved", rotate_prompt=False)
    ),
    "three-axes": toy_models.arch(rope=Rope((2, 1, 1))),
    "m-rope": toy_models.arch(rope=Rope((2, 1, 1), mrope=True), kv_heads=1),
    "partly-rotated-with-biases": toy_models.arch(rope=Rope((3, 0, 0), unrotated=1), qkv_bias=True),
    "sandwich-norm": toy_models.arch(norm="sandwich", final_norm="none"),
    "head-with-hidden-layer": toy_models.arch(norm="pre_skip_first", head_hidden=40),
}


@pytest.mark.parametrize("name", ARCHES)
def test_every_architecture_is_exact(name: str) -> None:
    """Speculative against plain decoding of the same weights."""
    check_architecture(name)


@pytest.mark.usefixtures("onednn_packs")
@pytest.mark.parametrize("name", ARCHES)
def test_every_architecture_is_exact_with_onednn_packs(name: str) -> None:
    assert check_architecture(name).blocks[0].out.weight.is_mkldnn  # type: ignore[union-attr]


def check_architecture(name: str) -> Transformer:
    of = toy_models.target(4, ARCHES[name])
    settings: dict[str, Any] = {"layout": toy_models.ROW_ENDS, "seeds": (1, 2), "guidance": 2.0}
    expected = toy_models.plain_tokens(of, **settings)
    for drafter in (SmallModel(of), toy_models.eagle(of, above=True)):
        assert torch.equal(
            toy_models.run_decode(of, drafter, Confidence(depth=4, top_k=4, nodes=30), **settings)[0], expected
        )
    return of.net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("codes", "head_dim", "ffn"), [(2, 10, 33), (33, 20, 50), (100, 12, 769), (576, 6, 100)])
def test_odd_sizes_are_exact(codes: int, head_dim: int, ffn: int, dtype: torch.dtype) -> None:
    """Numbers of codes and widths that vector instructions do not divide."""
    ids = range(4, 4 + codes)
    sizes = {"head_dim": head_dim, "rope": Rope.one_axis(head_dim), "ffn": ffn, "vocab": max(40, 8 + codes)}
    architecture = replace(toy_models.arch(), **sizes, outputs=ids)
    of = DecoderTarget(toy_models.target(6, architecture, dtype=dtype).net, image_offset=70)
    settings: dict[str, Any] = {"layout": Layout(4, 5, ids), "guidance": 1.5, "top_k": 20, "top_p": 0.9}
    together = toy_models.run_decode(
        of, SmallModel(of), Confidence(depth=4, top_k=4, nodes=30), seeds=(1, 2), **settings
    )
    for index, seed in enumerate((1, 2)):
        assert torch.equal(toy_models.plain_tokens(of, seeds=(seed,), first=index, **settings)[0], together[0][index])


@pytest.mark.usefixtures("threads")
def test_images_longer_than_a_sum_block_are_exact() -> None:
    """Attention sums over several blocks, trees that span two blocks, and prompts of different lengths."""
    layout = Layout(20, 20, toy_models.CODES)
    of = toy_models.target(5)
    settings: dict[str, Any] = {"layout": layout, "seeds": (3, 4), "guidance": 3.0}
    expected = toy_models.plain_tokens(of, **settings)
    tokens, histories, _ = toy_models.run_decode(of, SmallModel(of), Adjacency(nodes=64), **settings)
    assert torch.equal(tokens, expected)
    assert histories[0].tokens_per_pass > 5, "the test needs long accepted paths"


def test_single_kv_head_is_exact_alone_and_in_a_batch() -> None:
    """Threads share the sums of a single KV head; an image must not depend on the others of its batch."""
    of = toy_models.target(5, toy_models.arch(kv_heads=1))
    settings: dict[str, Any] = {"layout": Layout(20, 20, toy_models.CODES), "guidance": 1.0}
    together = toy_models.plain_tokens(of, seeds=(3, 4), **settings)
    assert torch.equal(toy_models.plain_tokens(of, seeds=(3,), **settings), together[:1])
    assert torch.equal(
        toy_models.run_decode(of, SmallModel(of), Adjacency(nodes=64), seeds=(3,), **settings)[0], together[:1]
    )


def test_projected_text_features_are_exact() -> None:
    """Prompts of text features through a projection, of a different length in every row."""
    projection = torch.nn.Linear(12, 32).requires_grad_(False)
    of = DecoderTarget(toy_models.target(6).net, projection=projection)
    generator = torch.Generator().manual_seed(1)
    rows = [Prompt(torch.randn(n, 12, generator=generator), torch.zeros(2, 12)) for n in (3, 7)]
    settings: dict[str, Any] = {"seeds": (5, 6), "guidance": 2.0, "rows": rows}
    assert torch.equal(
        toy_models.run_decode(of, toy_models.eagle(of), Confidence(nodes=20), **settings)[0],
        toy_models.plain_tokens(of, **settings),
    )


@pytest.mark.parametrize("policy", ["chain", "confidence", "static", "adjacency:init=both"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bf16_is_exact(policy: str, temperature: float) -> None:
    of = toy_models.target(7, dtype=torch.bfloat16)
    settings: dict[str, Any] = {"seeds": (1, 2), "guidance": 2.0, "temperature": temperature}
    assert torch.equal(
        toy_models.run_decode(of, SmallModel(of), policies.build(policy), **settings)[0],
        toy_models.plain_tokens(of, **settings),
    )


@torch.inference_mode()
def test_bf16_trees_round_as_chains_in_long_sequences() -> None:
    """The embedded model behind 500 tokens: a path of a random tree, and the same tokens as a chain."""
    model = load_model(open_checkpoint("tiny"), resolve_placement("cpu", "bfloat16"))
    layout, generator = model.make_layout(model.sizes[0]), torch.Generator().manual_seed(0)
    root, choose, codes = layout.start + 480, random.Random(0), (layout.codes.start, layout.codes.stop)
    session = model.target.open([model.make_prompt("a ghost", None, model.sizes[0])], layout, guidance=2.0)
    rows = len(session.lengths)
    steps = torch.arange(layout.start, root).expand(rows, -1)
    drawn = torch.randint(*codes, (1, 480), generator=generator).expand(rows, -1)
    embedded = model.target.net.embed(drawn)
    session.decoder.append(embedded, session.rope_table(steps), torch.tensor([480] * rows), [480] * rows)
    tokens = torch.randint(*codes, (1, 64), generator=generator)

    def logits(tree: DraftTree) -> torch.Tensor:
        out = session.forward(tree, torch.tensor([root])).logits
        session.cache.drop_nodes()
        return out

    for _ in range(12):
        parents, depths = [-1], [0]
        for node in range(1, 64):
            parents.append(choose.choice([node - 1, node - 1, choose.randrange(node)]))
            depths.append(depths[parents[-1]] + 1)
        path = [depths.index(max(depths))]
        while path[-1]:
            path.append(parents[path[-1]])
        shape = torch.tensor([parents])
        mask = ancestor_mask(shape, max(depths))
        tree = DraftTree(tokens, shape, torch.tensor([depths]), mask, torch.zeros_like(shape), 8)
        assert torch.equal(logits(tree)[:, path[::-1]], logits(chain(tokens[:, path[::-1]])))


def net() -> Transformer:
    module = Transformer(Arch(32, 3, 4, 48, 40, Rope.one_axis(8), kv_heads=2, outputs=toy_models.CODES)).eval()
    toy_models.randomise(module, 3)
    to_input_major(module)
    return module


@torch.no_grad()
def test_cache_after_a_commit_equals_a_fresh_prefill() -> None:
    """Random trees and paths, two rows of different length: keys, values and lengths, bit for bit."""
    module = net()
    generator = torch.Generator().manual_seed(2)
    layout, rope = Layout(16, 16, toy_models.CODES), module.arch.rope

    def cos_sin(steps: torch.Tensor) -> torch.Tensor:
        rotation = rope.image_rotation(layout, steps, torch.zeros(len(steps), dtype=torch.int64))
        return rope.cos_sin(rotation, torch.float32)

    for _ in range(20):
        decoder = CachedDecoder(module, 2, 700)
        cache = decoder.cache
        lengths = torch.randint(1, 600, (2,), generator=generator).tolist()
        tokens = torch.randint(4, 36, (2, 600), generator=generator)
        longest = max(lengths)
        prompt_cos_sin = cos_sin(torch.arange(longest).expand(2, -1))
        decoder.append(module.embed(tokens[:, :longest]), prompt_cos_sin, torch.tensor(lengths), lengths)
        nodes = int(torch.randint(6, 60, (1,), generator=generator))
        parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))]
        path = [nodes - 1]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        depths = torch.zeros(nodes, dtype=torch.int64)
        for node in range(1, nodes):
            depths[node] = depths[parents[node]] + 1
        tree_tokens = torch.randint(4, 36, (2, nodes), generator=generator)
        steps = torch.tensor(lengths)[:, None] + depths
        ancestors = ancestor_mask(torch.tensor([parents]), nodes).expand(2, -1, -1)
        decoder.append_nodes(module.embed(tree_tokens), cos_sin(steps), depths.expand(2, -1), ancestors)
        count = len(path)
        cache.compact(torch.tensor([path, path]), torch.tensor([count, count]), [count, count])
        for row, length in enumerate(lengths):
            total = length + count
            committed = torch.cat([tokens[row, :length], tree_tokens[row, path]])[None]
            fresh = CachedDecoder(module, 1, 700)
            steps = torch.arange(total)[None]
            fresh.append(module.embed(committed), cos_sin(steps), torch.tensor([total]), [total])
            assert cache.host_lengths[row] == total == int(cache.length[row])
            assert torch.equal(cache.keys[:, row, :, :total], fresh.cache.keys[:, 0, :, :total])
            assert torch.equal(cache.values[:, row, :, :total], fresh.cache.values[:, 0, :, :total])


@torch.no_grad()
def test_cached_decoder_equals_causal_attention() -> None:
    """Against attention over the whole sequence, which shares none of the cache's code."""
    module = net()
    tokens = torch.randint(4, 36, (2, 50), generator=torch.Generator().manual_seed(3))
    steps = torch.arange(50).expand(2, 50)
    rotation = module.arch.rope.image_rotation(
        Layout(16, 16, toy_models.CODES), steps, torch.zeros(2, dtype=torch.int64)
    )
    decoder = CachedDecoder(module, 2, 64)
    cos_sin = module.arch.rope.cos_sin(rotation, torch.float32)
    features = decoder.append(module.embed(tokens), cos_sin, torch.tensor([50, 50]), [50, 50])
    assert torch.allclose(features, module(module.embed(tokens), rotation, causal_attention), atol=1e-5)


@torch.no_grad()
def test_guidance_formula() -> None:
    """u + s (c - u); with guidance 1 there is no unconditional row."""
    of, prompts = toy_models.target(8), toy_models.prompts(1)
    cond = DecoderSession(of, prompts, toy_models.PLAIN, 1.0).prefill.logits
    uncond = DecoderSession(of, [Prompt(prompts[0].unconditional or ())], toy_models.PLAIN, 1.0).prefill.logits
    guided = DecoderSession(of, prompts, toy_models.PLAIN, 3.0).prefill.logits
    assert torch.allclose(guided, uncond + 3.0 * (cond - uncond), atol=1e-5)
    assert DecoderSession(of, prompts, toy_models.PLAIN, 1.0).cache.length.shape == (1,)


def test_state_dict_loads_into_packed_weights() -> None:
    """A checkpoint holds plain matrices; a packed net loads them and stays packed."""
    source, packed = (toy_models.target(seed=seed).net for seed in (1, 2))
    for module in (source, packed):
        pack_weights(module)
    assert source.blocks[0].qkv.weight.ndim == 3  # type: ignore[union-attr]
    packed.load_state_dict(source.state_dict())
    for loaded, expected in zip(packed.parameters(), source.parameters(), strict=True):
        assert torch.equal(loaded, expected)
    to_input_major(packed)
    assert all(torch.equal(value, packed.state_dict()[name]) for name, value in source.state_dict().items())
