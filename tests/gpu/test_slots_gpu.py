"""Continuous batching on a GPU: captured passes of mixed images give the tokens of drawing each alone."""

from __future__ import annotations

import gc
import random
from typing import Any

import graph_checks
import pytest
import slot_checks
import torch
import toy_models

from underdraw import Pipeline
from underdraw.engine.cuda_graphs import GraphCache, GraphRunner
from underdraw.engine.scheduler import Scheduler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", graph_checks.DRAFTERS)
@pytest.mark.parametrize("policy", ["chain:depth=4", "adjacency:init=both,nodes=24"])
@pytest.mark.parametrize("layout", graph_checks.LAYOUTS)
def test_random_arrivals_equal_plain(name: str, policy: str, layout: str) -> None:
    target = toy_models.target(device="cuda")
    parts = slot_checks.make_parts(target, name, policy, graphs=GraphCache(span_multiple=64))
    choose = random.Random(len(name))
    batch = slot_checks.check_arrivals(parts, graph_checks.LAYOUTS[layout], choose, guided=True, images=12, slots=4)
    assert any(captured is not None for runner in batch._captured.values() for captured in runner.passes.values())


@pytest.mark.parametrize(("drafter", "policy"), slot_checks.MIXING)
@pytest.mark.parametrize("layout", graph_checks.LAYOUTS)
def test_sizes_share_passes(drafter: str, policy: str, layout: str) -> None:
    target = toy_models.target(device="cuda")
    parts = slot_checks.make_parts(target, drafter, policy, graphs=GraphCache(span_multiple=64))
    slot_checks.check_sizes(parts, layout, random.Random(len(drafter)))


def mixed_requests(pipe: Pipeline, count: int) -> list[Any]:
    texts = ("a fox, 3D render", "a ghost on a purple background", "a red apple")
    return [
        pipe.request(
            texts[i % 3],
            seed=i,
            temperature=(1.0, 0.7, 0.0, 1.0)[i % 4],
            top_k=(0, 50, 0, 1000)[i % 4],
            guidance_scale=(2.0, 3.5, 1.0)[i % 3],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("drafter", ["jacobi", "jacobi-tree", "drafter-eagle", "forced"])
def test_embedded_model_in_bfloat16(drafter: str) -> None:
    """Row-invariant numerics: the image does not depend on the other images, the slots or the batch size."""
    pipe = Pipeline.from_pretrained("tiny", device="cuda", dtype="bfloat16", drafter=drafter, tree="chain:depth=7")
    requests = mixed_requests(pipe, 12)
    scheduler = Scheduler(pipe, slots=5)
    images = [scheduler.add(request)[0] for request in requests]
    while scheduler.has_work:
        scheduler.step()
    plain = pipe.plain()
    plain.set_progress_bar_config(disable=True)
    for image, request in zip(images, requests, strict=True):
        assert image.status == "finished", image.error
        assert image.history.tokens.tolist() == plain.generate(request, output_type="codes").history.tokens.tolist()


@pytest.mark.parametrize("drafter", ["jacobi", "jacobi-tree", "drafter-eagle", "forced"])
def test_images_of_crashed_passes_go_on_in_bfloat16(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured passes raise after the caches were written; the tokens stay those of plain decoding."""
    pipe = Pipeline.from_pretrained("tiny", device="cuda", dtype="bfloat16", drafter=drafter, tree="chain:depth=7")
    requests, scheduler = mixed_requests(pipe, 6), Scheduler(pipe, slots=4)
    calls, original = 0, GraphRunner.step

    def crash_twice(runner: GraphRunner, *call: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(runner, *call)
        if calls in (6, 90):
            raise RuntimeError("injected")
        return result

    monkeypatch.setattr(GraphRunner, "step", crash_twice)
    images = [scheduler.add(request)[0] for request in requests]
    while scheduler.has_work:
        scheduler.step()
    monkeypatch.undo()
    assert calls > 90
    plain = pipe.plain()
    plain.set_progress_bar_config(disable=True)
    for image, request in zip(images, requests, strict=True):
        assert image.status == "finished", image.error
        assert image.history.tokens.tolist() == plain.generate(request, output_type="codes").history.tokens.tolist()


def test_memory_does_not_grow_over_150_images() -> None:
    """Memory grows with newly captured passes alone: the same number of them needs the same memory."""
    target = toy_models.target(device="cuda")
    parts = slot_checks.make_parts(target, "eagle-above", "chain:depth=3", graphs=GraphCache())
    batch, choose = None, random.Random(3)
    memory: dict[int, list[int]] = {}  # allocated bytes by the number of captured passes
    for _ in range(15):
        batch = slot_checks.check_arrivals(
            parts, toy_models.PLAIN, choose, guided=True, images=10, slots=4, batch=batch
        )
        gc.collect()
        torch.cuda.synchronize()
        captured = sum(len(runner.passes) for runner in batch._captured.values())
        memory.setdefault(captured, []).append(torch.cuda.memory_allocated())
    rounds = max(memory.values(), key=len)
    assert len(rounds) >= 4, f"images of one layout need ever new passes: {memory}"
    # A small tensor of the last images may be alive; the KV cache of one image alone takes more than this.
    assert rounds[-1] - rounds[0] < 4096, f"later images need more memory than the first ones: {memory}"
