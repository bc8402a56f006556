"""Captured passes give the tokens of plain decoding: every drafter, policy, layout and batch, with replay tapes.

A tape fails if a captured pass waits for the device, and gives wrong tokens if it depends on values of the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graph_checks
import pytest
import torch
import torch._dynamo.testing
import toy_models
from replay_tape import Tape

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.errors import ConfigError
from underdraw.nn.layer_functions import EAGER
from underdraw.nn.row_invariant import max_rows
from underdraw.nn.transformer import DecoderLayer
from underdraw.plan import BUCKET_SIZES, MAX_NODES, TreePlan, bucket_size
from underdraw.protocols import Prompt
from underdraw.registry import policies, verifiers
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.tree_walk import TreeWalk


@pytest.fixture(autouse=True)
def _verify_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda on: True)


def tape_cache(**options: Any) -> GraphCache:
    return GraphCache(capture=Tape, span_multiple=64, **options)


@pytest.mark.parametrize(("name", "policy", "batch", "layout"), graph_checks.CASES)
def test_captured_equals_plain(name: str, policy: str, batch: str, layout: str) -> None:
    settings = {"layout": graph_checks.LAYOUTS[layout], "seeds": graph_checks.BATCHES[batch], "guidance": 2.0}
    graph_checks.check_two_decodes(toy_models.target(), tape_cache(), name, policy, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 12},
        {"top_p": 0.8},
        {"guidance": 1.0},
        {"token_stats": "keep"},
    ],
    ids=str,
)
def test_sampling_settings(settings: dict[str, Any]) -> None:
    graph_checks.check_two_decodes(
        toy_models.target(), tape_cache(), "eagle-above", "adjacency:nodes=24", seeds=(1, 2), **settings
    )


@pytest.mark.parametrize("min_bucket", BUCKET_SIZES)
def test_every_bucket(min_bucket: int) -> None:
    """Plain decoding, padded to every bucket size."""
    graph_checks.check_two_decodes(
        toy_models.target(), tape_cache(min_bucket=min_bucket), "forced", "none", seeds=(3,), guidance=2.0
    )


@pytest.mark.parametrize("name", ["eagle", "jacobi"])
@pytest.mark.parametrize("tree", ["chain:depth=3", "adjacency:nodes=12,d_max=6"])
@pytest.mark.parametrize(
    ("verifier", "proposal"), [("exact", "topk"), ("rejection", "sampled"), ("lantern", "topk"), ("lantern", "sampled")]
)
def test_verifiers_and_proposals_give_the_tokens_of_eager_passes(
    verifier: str, proposal: str, tree: str, name: str
) -> None:
    target, cache = toy_models.target(), tape_cache()
    built = verifiers.build(verifier)
    if isinstance(built, Lantern):
        built = built.bind(torch.randn(len(toy_models.ROW_ENDS.codes), 4, generator=torch.Generator().manual_seed(1)))
    settings: dict[str, Any] = {"verifier": built, "proposal": proposal, "seeds": (4, 5), "layout": toy_models.ROW_ENDS}
    drafter = toy_models.eagle(target, above=True) if name == "eagle" else Jacobi(window=4)
    parts = target, drafter, policies.build(tree)
    expected = toy_models.run_decode(*parts, **settings)[0]
    for _ in range(2):
        assert torch.equal(toy_models.run_decode(*parts, graphs=cache, **settings)[0], expected)
    assert graph_checks.count_captured(cache) >= 1


def test_history_records_the_grown_size_of_trees_with_min_probability() -> None:
    """The size depends on values on the device; the policy reads it from the history."""
    target = toy_models.target()
    tree, drafter = policies.build("cost:depth=4,nodes=12,node=2"), toy_models.eagle(target)
    for layout in (toy_models.PLAIN, toy_models.ROW_ENDS):
        eager, captured = (
            toy_models.run_decode(target, drafter, tree, layout=layout, graphs=cache)[1][0]
            for cache in (None, tape_cache())
        )
        assert eager.nodes.tolist() == captured.nodes.tolist()
        assert eager.depth.tolist() == captured.depth.tolist()
        assert 1 < eager.mean_nodes < 12


def test_later_images_reuse_buffers_and_graphs() -> None:
    target, cache = toy_models.target(), tape_cache()
    parts = target, toy_models.eagle(target), policies.build("confidence:depth=3,top_k=4,nodes=12")
    toy_models.run_decode(*parts, graphs=cache)
    addresses, count = graph_checks.buffer_addresses(cache), graph_checks.count_captured(cache)
    for seed in range(1, 5):
        toy_models.run_decode(*parts, graphs=cache, seeds=(seed,))
    assert graph_checks.buffer_addresses(cache) == addresses
    assert graph_checks.count_captured(cache) == count


def test_cache_keeps_max_runners() -> None:
    target, cache = toy_models.target(), tape_cache()
    parts = target, toy_models.eagle(target), policies.build("chain")
    for temperature in (0.0, 0.5, 1.0, 1.5):
        toy_models.run_decode(*parts, graphs=cache, temperature=temperature)
    assert len(cache.runners) == 2
    cache.max_runners = 4
    for temperature in (0.0, 0.5):
        toy_models.run_decode(*parts, graphs=cache, temperature=temperature)
    assert len(cache.runners) == 4


def test_drafter_without_capturable_session_runs_eagerly_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    target, cache, policy = toy_models.target(), tape_cache(), policies.build("chain")
    drafter = toy_models.Adversary(SmallModel(target))
    for _ in range(2):
        tokens = toy_models.run_decode(target, drafter, policy, graphs=cache)[0]
        assert torch.equal(tokens, toy_models.plain_tokens(target))
    assert cache.runners == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "passes with Adversary run eagerly" in record.message
    assert "slower" in record.message
    toy_models.run_decode(target, SmallModel(target), policy, graphs=cache)
    assert len(caplog.records) == 1, "a drafter that can be captured causes no warning"


def test_tape_behaves_like_a_cuda_graph() -> None:
    values = torch.ones(3)
    with pytest.raises(AssertionError, match="waits for the device"):
        Tape(lambda: values * float(values.sum()))
    host = [2.0]
    tape = Tape(lambda: values * host[0])
    values.fill_(5.0)
    host[0] = 100.0
    tape.replay()
    assert tape.out.tolist() == [10.0, 10.0, 10.0], (
        "values of the device are new, those of the host are from the capture"
    )


def test_layer_functions_are_compiled_once_for_all_layers() -> None:
    """Layers share the compiled code, and so do all numbers of nodes above one."""
    if max_rows():
        pytest.skip("on this processor a product of many rows is several, which are compiled for their number")
    torch._dynamo.reset()
    compiled_layer_functions("eager")  # marks functions as constant for the compiler
    counter = torch._dynamo.testing.CompileCounter()
    with torch.inference_mode():
        between = torch.compile(EAGER.layer_to_layer, fullgraph=True, backend=counter)
        net = toy_models.target(architecture=toy_models.arch(layers=4)).net
        caches = torch.zeros(2, 4, 2 * 4 * 64, 8)
        for count in (1, 8, 1, 64, 16):
            x, turn = torch.randn(2, count, 32), torch.randn(2, 2, count, 1, 8).unbind()
            slots = torch.randperm(512)[: 2 * count * 4].view(2, count, 4)
            for block, after, keys, values in zip(net.blocks, net.blocks[1:], *caches, strict=False):
                arguments = (block, after, x, x, turn, keys, values, slots)
                outputs = between(*arguments)
                written = caches.clone()
                for output, expected in zip(outputs, EAGER.layer_to_layer(*arguments), strict=True):
                    assert torch.equal(output, expected)
                assert torch.equal(caches, written)
    assert counter.frame_count == 2, "one compilation for one node, one for more"
    torch._dynamo.reset()


def test_compiled_passes_equal_plain() -> None:
    torch._dynamo.reset()
    cache = GraphCache(capture=EagerPass, layer_functions=compiled_layer_functions("aot_eager"))
    graph_checks.check_two_decodes(toy_models.target(), cache, "eagle", "chain:depth=3", seeds=(3,), guidance=2.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["jacobi", "jacobi-tree"])
def test_trunks_of_many_lengths_share_few_graphs(name: str) -> None:
    """The depth of a chain or a trunk costs nothing, so graphs are captured for bucketed depths only."""
    target, cache = toy_models.target(), tape_cache()
    drafter, policy = graph_checks.make_drafter(name, target), policies.build("trunk:nodes=16,init=random,shortest=1")
    depths = set()
    for seed in range(4):
        tokens, _, steps = toy_models.run_decode(target, drafter, policy, graphs=cache, seeds=(seed,))
        assert torch.equal(tokens, toy_models.plain_tokens(target, seeds=(seed,)))
        depths |= {step.plan.depth for step in steps}
    assert len(depths) > 6
    assert {key[0].depth for runner in cache.runners.values() for key in runner.passes} <= {1, 3, 7, 15}


def test_prompts_are_not_compiled() -> None:
    """Prompts have many lengths, and compiling takes seconds."""
    target, sizes = toy_models.target(), set()

    def leave(block: DecoderLayer, norm: torch.nn.Module, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        sizes.add(x.shape[1])
        return EAGER.finish_last_layer(block, norm, x, attended)

    cache = tape_cache(layer_functions=replace(EAGER, finish_last_layer=leave))
    for drafter in (toy_models.eagle(target, above=True), toy_models.block(target)):
        for length in (5, 6, 7, 9):
            rows = [Prompt((0,) * length, (0, 3))]
            toy_models.run_decode(
                target, drafter, policies.build("chain:depth=3"), graphs=cache, rows=rows, guidance=2.0
            )
    assert sizes <= {1, 4, 16, 19}, "trees, and slots after pending tokens; no prompt"


def test_bucketed_plans_are_few() -> None:
    bucketed = set()
    for depth in range(1, 11):
        for width in range(1, 13):
            plan = TreePlan(depth, width, width, 59)
            larger = plan.bucketed()
            assert larger.depth == depth and larger.width >= width and larger.branch >= width
            assert bucket_size(larger.nodes) == bucket_size(plan.nodes)
            bucketed.add(larger)
    assert len(bucketed) <= 60
    free = {TreePlan(depth, 2, 8, 64).bucketed(is_depth_free=True) for depth in range(12, 60)}
    assert free == {TreePlan(depth, 2, 8, 64) for depth in (15, 31, 63)}
    deepest = TreePlan(64, 4, 8, 128).bucketed(is_depth_free=True)
    assert deepest == TreePlan(127, 2, 8, 128), "the width is lowered to what a plan may expand"
    assert [bucket_size(count) for count in (1, 3, 9, 65, MAX_NODES)] == [1, 4, 16, 128, 128]
    with pytest.raises(ConfigError):
        TreePlan(2, 1, 1, MAX_NODES + 1)
