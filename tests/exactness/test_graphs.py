"""Captured passes give the tokens of plain decoding: every drafter, policy, layout and batch, with tapes for graphs.

A tape fails if the captured work waits for the device, and goes wrong if it depends on anything that the host knew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import captured
import pytest
import torch
import torch._dynamo.testing
import toy
from tape import Tape

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.errors import ConfigError
from underdraw.nn.layer_functions import EAGER
from underdraw.nn.transformer import DecoderLayer
from underdraw.plan import BUCKET_SIZES, MAX_NODES, TreePlan, bucket_size
from underdraw.protocols import Prompt
from underdraw.registry import policies, verifiers
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.tree_walk import TreeWalk


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda on: True)


def graphs(**options: Any) -> GraphCache:
    return GraphCache(capture=Tape, span_multiple=64, **options)


@pytest.mark.parametrize(("name", "policy", "batch", "layout"), captured.CASES)
def test_captured_equals_plain(name: str, policy: str, batch: str, layout: str) -> None:
    captured.check(
        toy.target(), graphs(), name, policy, layout=captured.LAYOUTS[layout], seeds=captured.BATCHES[batch],
        guidance=2.0,
    )  # fmt: skip


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
def test_every_setting(settings: dict[str, Any]) -> None:
    captured.check(toy.target(), graphs(), "eagle-above", "adjacency:nodes=24", seeds=(1, 2), **settings)


@pytest.mark.parametrize("smallest", BUCKET_SIZES)
def test_every_bucket(smallest: int) -> None:
    """Plain decoding through every padded size."""
    captured.check(toy.target(), graphs(min_bucket=smallest), "forced", "none", seeds=(3,), guidance=2.0)


@pytest.mark.parametrize("name", ["eagle", "jacobi"])
@pytest.mark.parametrize("tree", ["chain:depth=3", "adjacency:nodes=12,d_max=6"])
@pytest.mark.parametrize(
    ("verifier", "proposal"), [("exact", "topk"), ("rejection", "sampled"), ("lantern", "topk"), ("lantern", "sampled")]
)
def test_other_verifiers_and_proposals_draw_what_they_draw_without_graphs(
    verifier: str, proposal: str, tree: str, name: str
) -> None:
    of = toy.target()
    judge = verifiers.build(verifier)
    if isinstance(judge, Lantern):
        judge = judge.bind(torch.randn(len(toy.ROW_ENDS.codes), 4, generator=torch.Generator().manual_seed(1)))
    given: dict[str, Any] = {"verifier": judge, "proposal": proposal, "seeds": (4, 5), "layout": toy.ROW_ENDS}
    own, kept = toy.eagle(of, above=True) if name == "eagle" else Jacobi(window=4), graphs()
    expected = toy.run(of, own, policies.build(tree), **given)[0]
    for _ in range(2):
        assert torch.equal(toy.run(of, own, policies.build(tree), graphs=kept, **given)[0], expected)
    assert captured.captured(kept) >= 1


def test_trees_with_a_floor_are_noted_as_they_were_grown() -> None:
    """How large they became is found out on the device; the record, which the policy reads, says it either way."""
    of = toy.target()
    tree, own = policies.build("cost:depth=4,nodes=12,node=2"), toy.eagle(of)
    for layout in (toy.PLAIN, toy.ROW_ENDS):
        plain, taken = (toy.run(of, own, tree, layout=layout, graphs=way)[1][0] for way in (None, graphs()))
        assert plain.nodes.tolist() == taken.nodes.tolist()
        assert plain.depth.tolist() == taken.depth.tolist()
        assert 1 < plain.mean_nodes < 12


def test_buffers_stay_where_they_are() -> None:
    of, kept = toy.target(), graphs()
    tree, own = policies.build("confidence:depth=3,top_k=4,nodes=12"), toy.eagle(of)
    toy.run(of, own, tree, graphs=kept)
    before, count = captured.buffers(kept), captured.captured(kept)
    for seed in range(1, 5):
        toy.run(of, own, tree, graphs=kept, seeds=(seed,))
    assert captured.buffers(kept) == before
    assert captured.captured(kept) == count, "nothing is captured again for another picture"


def test_few_sets_of_buffers_are_kept() -> None:
    of, kept = toy.target(), graphs()
    for temperature in (0.0, 0.5, 1.0, 1.5):
        toy.run(of, toy.eagle(of), policies.build("chain"), graphs=kept, temperature=temperature)
    assert len(kept.runners) == 2
    kept.max_runners = 4
    for temperature in (0.0, 0.5):
        toy.run(of, toy.eagle(of), policies.build("chain"), graphs=kept, temperature=temperature)
    assert len(kept.runners) == 4


def test_drafter_without_capturable_session_runs_eagerly_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    of, cache = toy.target(), graphs()
    drafter = toy.Adversary(SmallModel(of))
    for _ in range(2):
        assert torch.equal(toy.run(of, drafter, policies.build("chain"), graphs=cache)[0], toy.plain(of))
    assert cache.runners == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "passes with Adversary run eagerly" in record.message
    assert "slower" in record.message
    toy.run(of, SmallModel(of), policies.build("chain"), graphs=cache)
    assert len(caplog.records) == 1, "a drafter that can be captured causes no warning"


def test_a_tape_notices_what_a_graph_would_not_survive() -> None:
    values = torch.ones(3)
    with pytest.raises(AssertionError, match="waits for the device"):
        Tape(lambda: values * float(values.sum()))
    host = [2.0]
    tape = Tape(lambda: values * host[0])
    values.fill_(5.0)
    host[0] = 100.0
    tape.replay()
    assert tape.out.tolist() == [10.0, 10.0, 10.0], "the device's values are new, the host's are those of the capture"


def test_regions_are_compiled_once_for_all_layers() -> None:
    """dynamo traces a region without a break; layers share it, and so do all numbers of nodes above one."""
    torch._dynamo.reset()
    compiled_layer_functions("eager")  # says what of it is constant
    counter = torch._dynamo.testing.CompileCounter()
    with torch.inference_mode():
        between = torch.compile(EAGER.layer_to_layer, fullgraph=True, backend=counter)
        net = toy.target(architecture=toy.arch(layers=4)).net
        caches = torch.zeros(2, 4, 2 * 4 * 64, 8)
        for count in (1, 8, 1, 64, 16):
            x, turn = torch.randn(2, count, 32), torch.randn(2, 2, count, 1, 8).unbind()
            slots = torch.randperm(512)[: 2 * count * 4].view(2, count, 4)
            for block, after, keys, values in zip(net.blocks, net.blocks[1:], *caches, strict=False):
                given = (block, after, x, x, turn, keys, values, slots)
                found = between(*given)
                written = caches.clone()
                for one, other in zip(found, EAGER.layer_to_layer(*given), strict=True):
                    assert torch.equal(one, other)
                assert torch.equal(caches, written)
    assert counter.frame_count == 2, "one compilation for one node, one for more"
    torch._dynamo.reset()


def test_compiled_passes_draw_the_same() -> None:
    torch._dynamo.reset()
    kept = GraphCache(capture=EagerPass, layer_functions=compiled_layer_functions("aot_eager"))
    captured.check(toy.target(), kept, "eagle", "chain:depth=3", seeds=(3,), guidance=2.0)
    torch._dynamo.reset()


def test_prompts_are_not_compiled() -> None:
    """Their lengths differ, and compiling takes seconds."""
    of, sizes = toy.target(), set()

    def leave(block: DecoderLayer, norm: torch.nn.Module, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        sizes.add(x.shape[1])
        return EAGER.finish_last_layer(block, norm, x, attended)

    kept = graphs(layer_functions=replace(EAGER, finish_last_layer=leave))
    for own in (toy.eagle(of, above=True), toy.block(of)):
        for length in (5, 6, 7, 9):
            rows = [Prompt((0,) * length, (0, 3))]
            toy.run(of, own, policies.build("chain:depth=3"), graphs=kept, rows=rows, guidance=2.0)
    assert sizes <= {1, 4, 16, 19}, "trees, and slots behind what is pending; no prompt"


def test_plans_are_rounded_to_few() -> None:
    rounded = set()
    for depth in range(1, 11):
        for width in range(1, 13):
            plan = TreePlan(depth, width, width, 59)
            larger = plan.bucketed()
            assert larger.depth == depth and larger.width >= width and larger.branch >= width
            assert bucket_size(larger.nodes) == bucket_size(plan.nodes)
            rounded.add(larger)
    assert len(rounded) <= 60
    assert [bucket_size(count) for count in (1, 3, 9, 65, MAX_NODES)] == [1, 4, 16, 128, 128]
    with pytest.raises(ConfigError):
        TreePlan(2, 1, 1, MAX_NODES + 1)
