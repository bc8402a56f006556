"""CUDA graphs: the tokens of plain decoding in float32, one copy a pass and no other wait, no growth of memory."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import attention_cases
import captured
import pytest
import topk_cases
import torch
import toy

from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import GraphCache, GraphRunner
from underdraw.engine.decode import decode
from underdraw.history import History
from underdraw.nn.attention import AttentionBackend
from underdraw.plan import SIZES
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("name", "policy", "batch", "layout"), captured.CASES)
def test_graphs_equal_plain(name: str, policy: str, batch: str, layout: str) -> None:
    """The plain pictures are drawn without graphs."""
    captured.check(
        toy.target(device="cuda"), GraphCache(span_multiple=64), name, policy, layout=captured.LAYOUTS[layout],
        seeds=captured.BATCHES[batch], guidance=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("smallest", SIZES)
@pytest.mark.parametrize("backend", ["sdpa", "matmul", "tree"])
def test_every_bucket(smallest: int, backend: AttentionBackend) -> None:
    of = toy.target(architecture=toy.arch(dim=64), device="cuda")  # heads as wide as a matrix unit needs them
    graphs = GraphCache(min_bucket=smallest, attention_backend=backend)
    captured.check(of, graphs, "forced", "none", seeds=(3,), guidance=2.0)


def test_eight_pictures_at_once() -> None:
    captured.check(
        toy.target(device="cuda"),
        GraphCache(),
        "eagle-above",
        "adjacency:nodes=24",
        seeds=tuple(range(8)),
        guidance=2.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_split_attention_is_attention(dtype: torch.dtype) -> None:
    from underdraw.kernels.tree_attention import tree_attention

    for case in attention_cases.CASES:
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        attention_cases.check_attention(case, tree_attention, torch.device("cuda"), dtype, tolerance)


@pytest.mark.parametrize("options", [{"kv_heads": 2}, {"qk_norm": "layer", "qk_norm_heads": "per_head"}], ids=str)
def test_other_architectures(options: dict[str, Any]) -> None:
    of = toy.target(architecture=toy.arch(**options), device="cuda")
    captured.check(of, GraphCache(), "model", "confidence:depth=3,top_k=4,nodes=12", seeds=(3,), guidance=2.0)


@pytest.mark.parametrize("seeds", [(3,), (3, 4, 5, 6)], ids=["one", "four"])
def test_compiled_layer_functions_equal_plain(seeds: tuple[int, ...]) -> None:
    graphs = GraphCache(layer_functions=compiled_layer_functions())
    captured.check(toy.target(device="cuda"), graphs, "eagle-above", "chain:depth=3", seeds=seeds, guidance=2.0)


@pytest.mark.parametrize("name", ["forced", "eagle-above", "block", "jacobi"])
def test_one_copy_a_pass_and_no_other_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sync debug mode is on but for the one copy, once everything that a picture needs has been captured."""
    of, graphs = toy.target(device="cuda"), GraphCache()
    own, policy = captured.drafter(name, of), policies.build("none" if name == "forced" else "chain:depth=3")
    copies, plain = 0, torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        values = plain(tensor)
        torch.cuda.set_sync_debug_mode(mode)
        return values

    def draw(careful: bool) -> int:
        history = History(toy.PLAIN)
        sampler = Sampler(toy.PLAIN, (1,), device="cuda")
        steps = decode(
            of, own, policy, Exact(), toy.prompts(1), sampler, guidance=2.0, histories=[history], graphs=graphs
        )  # fmt: skip
        next(steps)  # prompt and first pass
        nonlocal copies
        copies = 0
        torch.cuda.set_sync_debug_mode("error" if careful else "default")
        return sum(1 for _ in steps)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    try:
        draw(careful=False)
        draw(careful=False)
        passes = draw(careful=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert passes > 3
    assert copies == passes


def test_memory_does_not_grow_over_50_pictures() -> None:
    of, graphs = toy.target(device="cuda"), GraphCache()
    own = toy.eagle(of, above=True)
    trees = itertools.cycle([policies.build("chain:depth=3"), policies.build("confidence:depth=3,top_k=4,nodes=12")])
    held = []
    for seed in range(50):
        toy.run(of, own, next(trees), graphs=graphs, seeds=(seed,), guidance=2.0)
        torch.cuda.synchronize()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert max(held[25:]) <= max(held[:25]), "what the first pictures needed is enough for all"
    assert all(isinstance(passes, GraphRunner) for passes in graphs.runners.values())


def test_half_precision_draws() -> None:
    """bf16 and fp16 weights: kernels round by shape, so pictures may differ, but every one is whole, in its codes."""
    for dtype in (torch.bfloat16, torch.float16):
        of = toy.target(device="cuda", dtype=dtype)
        own, tree = captured.drafter("model", of), policies.build("chain:depth=3")
        drawn = toy.run(of, own, tree, graphs=GraphCache(), seeds=(1, 2), guidance=2.0)[0]
        assert bool(((drawn >= toy.CODES.start) & (drawn < toy.CODES.stop)).all())


def test_graphs_that_nobody_holds_do_not_spoil_a_capture() -> None:
    """Freeing a graph while another is captured is an error, and the collector frees them whenever it likes."""
    of, own = toy.target(device="cuda"), toy.eagle(toy.target(device="cuda"))
    for _ in range(3):  # garbage in circles, of which graphs are a part
        old = GraphCache()
        toy.run(of, own, policies.build("chain"), graphs=old)
        for passes in old.runners.values():
            passes.graphs.circle = passes  # type: ignore[attr-defined]
        del old, passes
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        captured.check(of, GraphCache(), "eagle", "chain:depth=3", seeds=(3,))
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.parametrize(("rows", "columns", "k"), [(64, 16384, 1000), *topk_cases.CASES])
def test_selection_is_that_of_torch(rows: int, columns: int, k: int) -> None:
    topk_cases.check_topk(rows, columns, k, torch.device("cuda"))
