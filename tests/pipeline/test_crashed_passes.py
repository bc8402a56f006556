"""An exception inside a pass: the image that causes it fails, its neighbours are drawn as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from underdraw import Pipeline
from underdraw.drafters.jacobi import JacobiSession
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.engine.scheduler import ScheduledImage, Scheduler
from underdraw.engine.step import StepRunner
from underdraw.nn.target import DecoderSession
from underdraw.protocols import DraftRequest
from underdraw.tree import DraftTree
from underdraw.verifiers.exact import Exact

CULPRIT = 6.5  # guidance scale of the image that passes fail for
PROMPTS = ("red fox", "a blue ghost", "purple", "fox")
KINDS: dict[str, dict[str, str]] = {
    "jacobi": {"drafter": "jacobi", "tree": "chain:depth=4"},
    "eagle": {"tree": "chain:depth=2"},
    "plain": {"drafter": "jacobi", "tree": "none"},
}


@pytest.fixture(params=["jacobi", "jacobi, captured", "eagle", "plain", "plain, captured"])
def pipe(small_model: Path, request: pytest.FixtureRequest) -> Pipeline:
    kind, _, captured = request.param.partition(", ")
    built = Pipeline.from_pretrained(small_model, **KINDS[kind])
    if captured:
        built.graphs = GraphCache(capture=EagerPass)
    return built


@pytest.fixture
def jacobi(small_model: Path) -> Pipeline:
    return Pipeline.from_pretrained(small_model, **KINDS["jacobi"])


def drain(scheduler: Scheduler) -> list[int]:
    """Step until nothing is left; returns how many images ran in each step."""
    counts = []
    for _ in range(500):
        if not scheduler.has_work:
            return counts
        counts.append(len({image for image, _ in scheduler.step().results}))
    raise AssertionError("still busy")


def add_images(scheduler: Scheduler, seeds: Sequence[int] = range(4)) -> list[ScheduledImage]:
    """Images with guidance, each with its own scale."""
    request = scheduler.pipe.request
    return [scheduler.add(request(PROMPTS[s % 4], seed=s, guidance_scale=2.0 + s))[0] for s in seeds]


def assert_drawn_as_alone(pipe: Pipeline, images: Sequence[ScheduledImage]) -> None:
    for image in images:
        assert image.status == "finished" and image.error is None
        assert image.history.tokens.tolist() == pipe.plain().generate(image.request).history.tokens.tolist()


def break_method(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    should_fail: Callable[..., bool],
    error: Exception | None = None,
) -> None:
    """Let a method raise where `should_fail` says so of its arguments."""
    original = getattr(owner, method)

    def broken(self: Any, *call: Any, **options: Any) -> Any:
        if should_fail(self, *call):
            raise error or RuntimeError("injected")
        return original(self, *call, **options)

    monkeypatch.setattr(owner, method, broken)


def has_culprit(session: DecoderSession, tree: DraftTree, steps: torch.Tensor) -> bool:
    """Whether the image that fails is in the batch and has reached step 12."""
    assert isinstance(session.guidance, torch.Tensor)
    return bool(((session.guidance[:, 0, 0] == CULPRIT) & (steps >= 12)).any())


def test_only_the_image_that_fails_alone_fails(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(pipe, slots=4)
    with monkeypatch.context() as patch:
        break_method(patch, DecoderSession, "forward", has_culprit)
        images = add_images(scheduler, [0, 1])
        (culprit,) = scheduler.add(pipe.request("ghost", seed=9, guidance_scale=CULPRIT))
        images += add_images(scheduler, [2, 3])
        drain(scheduler)
    assert culprit.status == "failed" and str(culprit.error) == "injected" and culprit.history.next_step >= 12
    assert_drawn_as_alone(pipe, images)
    late = add_images(scheduler)
    assert max(drain(scheduler)) == 4, "all slots are in use again"
    assert_drawn_as_alone(pipe, late)


@pytest.mark.parametrize(
    ("pipe", "owner", "method"),
    [
        ("jacobi", DecoderSession, "forward"),
        ("jacobi, captured", Exact, "verify"),
        ("eagle", StepRunner, "pack_for_host"),
        ("plain", DecoderSession, "commit"),
    ],
    ids=["forward", "verify", "pack", "commit"],
    indirect=["pipe"],
)
def test_an_error_that_does_not_come_back_costs_nobody_the_image(
    pipe: Pipeline, owner: type, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it happens in the pass, twice: what was written to the caches by then does not matter."""
    calls = crashes = 0
    scheduler = Scheduler(pipe, slots=4)

    def is_due(*call: object) -> bool:
        nonlocal calls, crashes
        calls += 1
        is_now = not scheduler._restarting and (calls == 4 or (crashes == 1 and calls > 6))
        crashes += is_now
        return is_now

    with monkeypatch.context() as patch:
        break_method(patch, owner, method, is_due)
        images = add_images(scheduler)
        drain(scheduler)
    assert crashes == 2 and caplog.text.count("restarting each of its images") == 2
    assert_drawn_as_alone(pipe, images)


def test_a_drafter_that_raises_for_one_seed(jacobi: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_second(session: JacobiSession, request: DraftRequest) -> bool:
        return bool(((request.noise_window.sampler.seeds == 1) & (request.steps > 9)).any())

    scheduler = Scheduler(jacobi, slots=4)
    with monkeypatch.context() as patch:
        break_method(patch, JacobiSession, "draft", is_second)
        images = add_images(scheduler)
        drain(scheduler)
    assert images.pop(1).status == "failed"
    assert_drawn_as_alone(jacobi, images)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("injected"), RuntimeError("injected")], ids=["memory", "bug"])
def test_passes_that_fail_with_many_images_run_with_fewer(
    jacobi: Pipeline, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody fails alone, so the batch is halved: at once if memory is short, else when it fails again."""
    scheduler = Scheduler(jacobi, slots=8)
    with monkeypatch.context() as patch:
        break_method(patch, DecoderSession, "forward", lambda session, tree, steps: (steps < 35).sum() > 3, error)
        images = add_images(scheduler, range(8))
        drain(scheduler)
        assert next(iter(scheduler._batches.values())).max_slots <= 3
        late = add_images(scheduler, range(8, 12))
        assert 2 <= max(drain(scheduler)) <= 3
    assert_drawn_as_alone(jacobi, images + late)


def test_an_image_alone_that_always_fails(jacobi: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(jacobi, slots=2)
    with monkeypatch.context() as patch:
        break_method(patch, DecoderSession, "forward", lambda *call: True)
        images = add_images(scheduler, [0])
        assert len(drain(scheduler)) <= 4
    assert [image.status for image in images] == ["failed"] and not scheduler.has_work
    images = add_images(scheduler)
    drain(scheduler)
    assert_drawn_as_alone(jacobi, images)


def test_prefill_without_memory_waits_for_a_slot(jacobi: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that does not fit next to the images that run is drawn after them."""
    scheduler = Scheduler(jacobi, slots=4)
    images = add_images(scheduler, [0, 1])
    scheduler.step()
    with monkeypatch.context() as patch:
        full = torch.OutOfMemoryError("injected")
        break_method(patch, DecoderSession, "_prefill", lambda *call: scheduler.running > 1, full)
        images += add_images(scheduler, [2, 3])
        assert max(drain(scheduler)) == 2
    assert_drawn_as_alone(jacobi, images)


def test_restarting_images_can_be_cancelled(jacobi: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(jacobi, slots=4)
    images = add_images(scheduler)
    scheduler.step()
    with monkeypatch.context() as patch:
        break_method(patch, DecoderSession, "forward", lambda *call: True)
        scheduler.step()
    assert scheduler.running == 4
    scheduler.cancel(images[1:])
    assert set(scheduler.step().finished) == set(images[1:]) and scheduler.running == 1
    drain(scheduler)
    assert_drawn_as_alone(jacobi, images[:1])
