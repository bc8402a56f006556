"""CUDA graphs: the tokens of plain decoding in float32, one copy to the host per pass, and constant memory."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import attention_cases
import graph_checks
import jacobi_kernel_cases
import pytest
import topk_cases
import torch
import toy_models

from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import GraphCache, GraphRunner
from underdraw.engine.decode import decode
from underdraw.history import History
from underdraw.nn.attention import AttentionBackend
from underdraw.plan import BUCKET_SIZES
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("name", "policy", "batch", "layout"), graph_checks.CASES)
def test_graphs_equal_plain(name: str, policy: str, batch: str, layout: str) -> None:
    """Plain decoding runs without CUDA graphs."""
    settings = {"layout": graph_checks.LAYOUTS[layout], "seeds": graph_checks.BATCHES[batch], "guidance": 2.0}
    target = toy_models.target(device="cuda")
    graph_checks.check_two_decodes(target, GraphCache(span_multiple=64), name, policy, **settings)


@pytest.mark.parametrize("min_bucket", BUCKET_SIZES)
@pytest.mark.parametrize("backend", ["sdpa", "matmul", "tree"])
def test_every_bucket(min_bucket: int, backend: AttentionBackend) -> None:
    target = toy_models.target(architecture=toy_models.arch(dim=64), device="cuda")  # tensor cores need heads of 16
    graphs = GraphCache(min_bucket=min_bucket, attention_backend=backend)
    graph_checks.check_two_decodes(target, graphs, "forced", "none", seeds=(3,), guidance=2.0)


def test_batch_of_eight() -> None:
    graph_checks.check_two_decodes(
        toy_models.target(device="cuda"),
        GraphCache(),
        "eagle-above",
        "adjacency:nodes=24",
        seeds=tuple(range(8)),
        guidance=2.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tree_attention_kernel_matches_reference(dtype: torch.dtype) -> None:
    from underdraw.kernels.tree_attention import tree_attention

    for case in attention_cases.CASES:
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        attention_cases.check_attention(case, tree_attention, torch.device("cuda"), dtype, tolerance)


@pytest.mark.parametrize("options", [{"kv_heads": 2}, {"qk_norm": "layer", "qk_norm_heads": "per_head"}], ids=str)
def test_other_architectures(options: dict[str, Any]) -> None:
    target = toy_models.target(architecture=toy_models.arch(**options), device="cuda")
    graph_checks.check_two_decodes(
        target, GraphCache(), "model", "confidence:depth=3,top_k=4,nodes=12", seeds=(3,), guidance=2.0
    )


@pytest.mark.parametrize("seeds", [(3,), (3, 4, 5, 6)], ids=["one", "four"])
def test_compiled_layer_functions_equal_plain(seeds: tuple[int, ...]) -> None:
    graphs = GraphCache(layer_functions=compiled_layer_functions())
    graph_checks.check_two_decodes(
        toy_models.target(device="cuda"), graphs, "eagle-above", "chain:depth=3", seeds=seeds, guidance=2.0
    )


@pytest.mark.parametrize("name", ["forced", "eagle-above", "block", "jacobi"])
def test_one_copy_to_the_host_per_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all passes are captured, torch's sync debug mode finds no wait for the device but this copy."""
    target, graphs = toy_models.target(device="cuda"), GraphCache()
    drafter = graph_checks.make_drafter(name, target)
    policy = policies.build("none" if name == "forced" else "chain:depth=3")
    copies, original_tolist = 0, torch.Tensor.tolist

    def counting_tolist(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        values = original_tolist(tensor)
        torch.cuda.set_sync_debug_mode(mode)
        return values

    def count_passes(*, check_syncs: bool) -> int:
        history = History(toy_models.PLAIN)
        sampler = Sampler(toy_models.PLAIN, (1,), device="cuda")
        steps = decode(
            target,
            drafter,
            policy,
            Exact(),
            toy_models.prompts(1),
            sampler,
            guidance=2.0,
            histories=[history],
            graphs=graphs,
        )
        next(steps)  # prefill and first pass
        nonlocal copies
        copies = 0
        torch.cuda.set_sync_debug_mode("error" if check_syncs else "default")
        return sum(1 for _ in steps)

    monkeypatch.setattr(torch.Tensor, "tolist", counting_tolist)
    try:
        count_passes(check_syncs=False)
        count_passes(check_syncs=False)
        passes = count_passes(check_syncs=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert passes > 3
    assert copies == passes


def test_memory_does_not_grow_over_50_images() -> None:
    target, graphs = toy_models.target(device="cuda"), GraphCache()
    drafter = toy_models.eagle(target, above=True)
    trees = itertools.cycle([policies.build("chain:depth=3"), policies.build("confidence:depth=3,top_k=4,nodes=12")])
    memory = []
    for seed in range(50):
        toy_models.run_decode(target, drafter, next(trees), graphs=graphs, seeds=(seed,), guidance=2.0)
        torch.cuda.synchronize()
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert max(memory[25:]) <= max(memory[:25]), "later images need no more memory than the first ones"
    assert all(isinstance(runner, GraphRunner) for runner in graphs.runners.values())


def test_half_precision_decodes_complete_images() -> None:
    """In bf16 and fp16 kernels round by shape, so tokens may differ from plain decoding; all of them are codes."""
    for dtype in (torch.bfloat16, torch.float16):
        target = toy_models.target(device="cuda", dtype=dtype)
        drafter, tree = graph_checks.make_drafter("model", target), policies.build("chain:depth=3")
        tokens = toy_models.run_decode(target, drafter, tree, graphs=GraphCache(), seeds=(1, 2), guidance=2.0)[0]
        assert bool(((tokens >= toy_models.CODES.start) & (tokens < toy_models.CODES.stop)).all())


def test_garbage_collection_does_not_break_a_capture() -> None:
    """Freeing a graph while another is captured is an error, and the garbage collector may run at any time."""
    target, drafter = toy_models.target(device="cuda"), toy_models.eagle(toy_models.target(device="cuda"))
    for _ in range(3):  # reference cycles that hold graphs
        old = GraphCache()
        toy_models.run_decode(target, drafter, policies.build("chain"), graphs=old)
        for runner in old.runners.values():
            runner.graphs.cycle = runner  # type: ignore[attr-defined]
        del old, runner
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        graph_checks.check_two_decodes(target, GraphCache(), "eagle", "chain:depth=3", seeds=(3,))
    finally:
        gc.set_threshold(*threshold)


@pytest.mark.parametrize("case", [(4, 64, 8, 64), *jacobi_kernel_cases.GROWN])
def test_kernel_grows_the_trees_of_torch(case: tuple[int, int, int, int]) -> None:
    jacobi_kernel_cases.check_trunk_tree(case, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_moves_accepted_nodes_together(dtype: torch.dtype) -> None:
    jacobi_kernel_cases.check_compact(dtype, torch.device("cuda"))


@pytest.mark.parametrize(("rows", "columns", "k"), [(64, 16384, 1000), *topk_cases.CASES])
def test_topk_kernel_matches_torch(rows: int, columns: int, k: int) -> None:
    topk_cases.check_topk(rows, columns, k, torch.device("cuda"))
