"""Continuous batching gives the tokens of drawing each image alone: random arrivals, cancellations and settings.

Every drafter and policy, eagerly and with replay tapes, which stand for CUDA graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import graph_checks
import numpy as np
import pytest
import slot_checks
import torch
import toy_models
from replay_tape import Tape

from underdraw.drafters.small_model import SmallModel
from underdraw.engine import slot_sampler
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.slot_batch import SlotBatch, bucket_slots
from underdraw.errors import CapacityError
from underdraw.registry import verifiers
from underdraw.verifiers.tree_walk import TreeWalk


@pytest.fixture
def make_cache(monkeypatch: pytest.MonkeyPatch) -> Callable[[], GraphCache]:
    """Captured passes verify as on a GPU."""

    def make() -> GraphCache:
        monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda on: True)
        return GraphCache(capture=Tape, span_multiple=64)

    return make


def cases() -> list[Any]:
    """Drafter, policy, layout, guidance and capture: every drafter with every policy, the rest alternates.

    A third of them runs always, with every drafter and policy, the others with `-m full`.
    """
    every_policy = (*graph_checks.POLICIES, "cost:depth=4,nodes=12,node=2")
    return [
        pytest.param(
            drafter,
            policy,
            list(graph_checks.LAYOUTS)[(i + j) % 2],
            (i + j // 2) % 2 == 0,
            (i // 2 + j) % 2 == 0,
            marks=[] if (i + 2 * j) % 3 == 0 else pytest.mark.full,
        )
        for i, drafter in enumerate(graph_checks.DRAFTERS)
        for j, policy in enumerate(every_policy)
    ]


@pytest.mark.parametrize(("drafter", "policy", "layout", "guided", "captured"), cases())
def test_random_arrivals_equal_plain(
    drafter: str, policy: str, layout: str, guided: bool, captured: bool, make_cache: Callable[[], GraphCache]
) -> None:
    target = toy_models.target()
    parts = slot_checks.make_parts(target, drafter, policy, graphs=make_cache() if captured else None)
    seed = sum(map(ord, drafter + policy))
    slot_checks.check_arrivals(parts, graph_checks.LAYOUTS[layout], random.Random(seed), guided=guided)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_greedy_images(captured: bool, make_cache: Callable[[], GraphCache]) -> None:
    parts = slot_checks.make_parts(
        toy_models.target(), "jacobi", "chain:depth=4", graphs=make_cache() if captured else None
    )
    slot_checks.check_arrivals(parts, toy_models.PLAIN, random.Random(1), guided=True, greedy=True)


def mixed_cases() -> list[Any]:
    """Drafter, policy, layout and capture; each of the first once, the others with `-m full`."""
    return [
        pytest.param(*pair, layout, captured, marks=[] if i // 2 == j and captured == (i > 0) else pytest.mark.full)
        for i, pair in enumerate(slot_checks.MIXING)
        for j, layout in enumerate(graph_checks.LAYOUTS)
        for captured in (False, True)
    ]


@pytest.mark.parametrize(("drafter", "policy", "layout", "captured"), mixed_cases())
def test_sizes_share_passes(
    drafter: str, policy: str, layout: str, captured: bool, make_cache: Callable[[], GraphCache]
) -> None:
    parts = slot_checks.make_parts(toy_models.target(), drafter, policy, graphs=make_cache() if captured else None)
    slot_checks.check_sizes(parts, layout, random.Random(len(drafter + policy + layout)))


@pytest.mark.parametrize(("drafter", "captured"), [("eagle-above", True), ("jacobi", False), ("jacobi-tree", True)])
def test_previews_of_images(drafter: str, captured: bool, make_cache: Callable[[], GraphCache]) -> None:
    """A smaller grid of codes is drawn before the image."""
    parts = slot_checks.make_parts(
        toy_models.target(), drafter, "chain:depth=4", graphs=make_cache() if captured else None
    )
    layout = replace(toy_models.PLAIN, prologue=(1,), preview=(2, 3))
    slot_checks.check_arrivals(parts, layout, random.Random(len(drafter)), guided=captured)


def test_captured_passes_stay_captured(make_cache: Callable[[], GraphCache]) -> None:
    """Later images replay the passes of earlier ones, in the same memory, whatever their settings are."""
    cache = make_cache()
    parts = slot_checks.make_parts(toy_models.target(), "eagle", "chain:depth=3", graphs=cache)
    batch = slot_checks.check_arrivals(parts, toy_models.PLAIN, random.Random(2), guided=True, images=6, slots=2)
    captured = {size: dict(runner.passes) for size, runner in batch._captured.items()}
    assert set(captured) == {1, 2}
    slot_checks.check_arrivals(parts, toy_models.PLAIN, random.Random(3), guided=True, images=6, slots=2, batch=batch)
    for size, passes in captured.items():
        runner = batch._captured[size]
        assert all(runner.passes[key] is tape for key, tape in passes.items() if tape is not None)
        assert sum(tape is not None for tape in runner.passes.values()) <= 8, "few different passes"


def test_longer_prompts_move_running_images_to_larger_caches() -> None:
    choose = random.Random(5)
    parts = slot_checks.make_parts(toy_models.target(), "eagle-above", "chain:depth=3")
    batch = slot_checks.open_batch(parts, toy_models.PLAIN, guided=True, slots=3)
    images = [slot_checks.make_image(toy_models.PLAIN, choose, guided=True, length=length) for length in (3, 140, 300)]
    for image in images:
        batch.admit([image])
        batch.step()
    assert batch.prompt_length >= 300
    while batch.running:
        batch.step()
    for image in images:
        assert image.history.tokens.tolist() == slot_checks.plain_tokens(parts.target, image)


def test_batches_shrink_when_images_leave() -> None:
    choose = random.Random(6)
    parts = slot_checks.make_parts(toy_models.target(), "jacobi", "chain:depth=3")
    batch = slot_checks.open_batch(parts, toy_models.PLAIN, guided=False, slots=8)
    images = [slot_checks.make_image(toy_models.PLAIN, choose, guided=False) for _ in range(7)]
    assert batch.admit(images) == 7 and len(batch.slots) == 8
    batch.step()
    batch.remove(images[1:6])
    for _ in range(6):
        batch.step()
    assert len(batch.slots) == 2
    while batch.running:
        batch.step()
    for image in (images[0], images[6]):
        assert image.history.tokens.tolist() == slot_checks.plain_tokens(parts.target, image)


def test_no_memory_for_more_slots_draws_fewer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose = random.Random(7)
    parts = slot_checks.make_parts(toy_models.target(), "jacobi", "chain:depth=3")
    batch = slot_checks.open_batch(parts, toy_models.PLAIN, guided=False, slots=8)
    original = SlotBatch._open

    def open_at_most_two(batch: SlotBatch, size: int, prompt_length: int) -> Any:
        if size > 2:
            raise CapacityError("too many")
        return original(batch, size, prompt_length)

    monkeypatch.setattr(SlotBatch, "_open", open_at_most_two)
    images = [slot_checks.make_image(toy_models.PLAIN, choose, guided=False) for _ in range(5)]
    waiting = list(images)
    for _ in range(200):
        if waiting and batch.free:
            waiting = waiting[batch.admit(waiting[: batch.free]) :]
        elif not batch.running:
            break
        if batch.running:
            batch.step()
    assert batch.max_slots == 2 and "no memory for" in caplog.text
    for image in images:
        assert image.history.tokens.tolist() == slot_checks.plain_tokens(parts.target, image)


def test_drafter_without_copies_draws_one_image_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    target, choose = toy_models.target(), random.Random(8)
    parts = replace(
        slot_checks.make_parts(target, "forced", "chain:depth=3"), drafter=toy_models.Adversary(SmallModel(target))
    )
    batch = slot_checks.open_batch(parts, toy_models.PLAIN, guided=True, slots=4)
    waiting = images = [slot_checks.make_image(toy_models.PLAIN, choose, guided=True) for _ in range(3)]
    while waiting or batch.running:
        if waiting and batch.free:
            waiting = waiting[batch.admit(waiting[: batch.free]) :]
        batch.step()
    assert len(caplog.records) == 1 and "Adversary draws one image at a time" in caplog.text
    for image in images:
        assert image.history.tokens.tolist() == slot_checks.plain_tokens(target, image)


def test_numbers_of_slots() -> None:
    assert [bucket_slots(n, 64, is_captured=True) for n in (1, 2, 3, 5, 33)] == [1, 2, 4, 8, 64]
    assert [bucket_slots(n, 64, is_captured=False) for n in (1, 2, 3, 4, 5, 7, 9, 13, 33)] == [
        1, 2, 3, 4, 6, 8, 12, 16, 48,
    ]  # fmt: skip
    assert bucket_slots(9, 10, is_captured=True) == 10


@pytest.mark.parametrize("name", ["jacobi", "eagle"])
def test_one_copy_to_the_host_per_pass(
    name: str, make_cache: Callable[[], GraphCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no image enters or leaves; tapes fail if a captured pass waits for the device."""
    choose = random.Random(9)
    parts = slot_checks.make_parts(toy_models.target(), name, "chain:depth=2", graphs=make_cache())
    batch = slot_checks.open_batch(parts, toy_models.PLAIN, guided=True, slots=4)
    batch.admit([slot_checks.make_image(toy_models.PLAIN, choose, guided=True) for _ in range(3)])
    copies, original_tolist = 0, torch.Tensor.tolist

    def counting_tolist(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        return original_tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counting_tolist)
    for _ in range(5):
        results, _ = batch.step()
        assert len(results) == 3
    assert copies == 5


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", ["jacobi", "eagle"])
def test_other_verifiers_draw_complete_images(name: str, captured: bool, make_cache: Callable[[], GraphCache]) -> None:
    """Their tokens depend on the drafts, so they need not be those of drawing each image alone; all are codes."""
    choose = random.Random(10)
    parts = slot_checks.make_parts(
        toy_models.target(),
        name,
        "chain:depth=3",
        graphs=make_cache() if captured else None,
        verifier=verifiers.build("rejection"),
        proposal="sampled",
        token_stats="keep",
    )
    batch = slot_checks.open_batch(parts, toy_models.PLAIN, guided=True, slots=2)
    waiting = images = [slot_checks.make_image(toy_models.PLAIN, choose, guided=True) for _ in range(4)]
    while waiting or batch.running:
        count = batch.admit(waiting[:1]) if waiting and batch.free else 0
        waiting = waiting[count:]
        batch.step()
    for image in images:
        assert set(image.history.tokens.tolist()) <= set(toy_models.CODES)
        assert np.isfinite(image.history.entropy).all()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_without_precomputed_noise(
    captured: bool, make_cache: Callable[[], GraphCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of many slots may be too large; then noise is computed in every pass."""
    monkeypatch.setattr(slot_sampler, "MAX_NOISE_BYTES", 0)
    parts = slot_checks.make_parts(
        toy_models.target(), "jacobi", "chain:depth=3", graphs=make_cache() if captured else None
    )
    slot_checks.check_arrivals(parts, toy_models.PLAIN, random.Random(11), guided=False)


@pytest.mark.parametrize("drafter", graph_checks.DRAFTERS)
def test_restarted_images_go_on_as_if_nothing_had_happened(drafter: str, make_cache: Callable[[], GraphCache]) -> None:
    """Batches are thrown away after random passes; all images are brought back from their tokens, one by one."""
    index = graph_checks.DRAFTERS.index(drafter)
    layout, guided = list(graph_checks.LAYOUTS.values())[index % 2], index % 3 != 0
    policy = "trunk:nodes=16" if drafter == "jacobi-tree" else "chain:depth=3"
    choose = random.Random(12 + index)
    parts = slot_checks.make_parts(
        toy_models.target(), drafter, policy, graphs=make_cache() if index // 2 % 2 else None, token_stats="keep"
    )
    batch = slot_checks.open_batch(parts, layout, guided=guided, slots=4)
    images = [slot_checks.make_image(layout, choose, guided=guided) for _ in range(3)]
    assert batch.admit(images) == 3
    crashes = 0
    while batch.running:
        batch.step()
        if choose.random() < 0.3 and crashes < 4:
            running = [image for image in batch.slots if image is not None]
            batch, crashes = slot_checks.open_batch(parts, layout, guided=guided, slots=4), crashes + 1
            for image in running:
                before = image.history.passes
                result = batch.restart(image)
                assert image.history.passes == before + 1 and result.index == before
    assert crashes >= 2
    for image in images:
        assert image.history.tokens.tolist() == slot_checks.plain_tokens(parts.target, image)
        assert np.isfinite(image.history.entropy[layout.start : layout.stop]).any()
