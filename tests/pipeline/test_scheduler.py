"""The scheduler draws the images of many requests, each as if it were alone."""

from __future__ import annotations

import threading
from pathlib import Path

import checkpoint_writers
import numpy as np
import pytest

from underdraw import Pipeline
from underdraw.distributed.planned_images import WorkerOptions
from underdraw.distributed.worker import ImageWorker
from underdraw.engine import autotune
from underdraw.engine import scheduler as scheduler_module
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.engine.scheduler import ScheduledImage, Scheduler
from underdraw.engine.window_costs import WindowCosts
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.models.family import ImageSize
from underdraw.plan import TreePlan
from underdraw.registry import policies
from underdraw.request import GenerationRequest


def drain(scheduler: Scheduler, max_steps: int = 2000) -> list[ScheduledImage]:
    """Step until nothing is left; returns the images in the order in which they ended."""
    ended = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return ended
        ended += scheduler.step().finished
    raise AssertionError(f"still busy after {max_steps} steps")


def tokens_alone(pipe: Pipeline, request: GenerationRequest) -> list[list[int]]:
    return [pipe.generate(request.select([i])).history.tokens.tolist() for i in range(len(request.prompts))]


def test_images_are_those_of_drawing_each_alone(pipe: Pipeline) -> None:
    requests = [
        pipe.request(["red fox", "a blue ghost"], seed=5, temperature=0.7, top_k=20),
        pipe.request("purple", seed=9, guidance_scale=3.0),
        pipe.request("fox", seed=2, temperature=0.0, num_images_per_prompt=3),
    ]
    scheduler = Scheduler(pipe, slots=2)
    images = [scheduler.add(request, request_id=f"r{i}") for i, request in enumerate(requests)]
    assert scheduler.waiting == 6 and scheduler.running == 0
    ended = drain(scheduler)
    assert len(ended) == 6 and all(image.status == "finished" for image in ended)
    for number, (request, drawn) in enumerate(zip(requests, images, strict=True)):
        assert [image.history.tokens.tolist() for image in drawn] == tokens_alone(pipe, request)
        assert [(image.request_id, image.index) for image in drawn] == [(f"r{number}", i) for i in range(len(drawn))]
        assert [(image.prompt, image.seed) for image in drawn] == list(zip(request.prompts, request.seeds, strict=True))
    assert all(image.run_seconds > 0 and image.queued_seconds >= 0 for image in ended)


def test_results_are_what_the_history_records(pipe: Pipeline) -> None:
    scheduler = Scheduler(pipe, slots=3, token_stats="keep")
    images = scheduler.add(pipe.request("fox", seed=1, num_images_per_prompt=3))
    counts = dict.fromkeys(images, 0)
    while scheduler.has_work:
        for image, result in scheduler.step().results:
            counts[image] += 1
            drawn = image.history.tokens[result.start + 1 : result.start + 1 + len(result.tokens)]
            assert drawn.tolist() == list(result.tokens)
    assert counts == {image: image.history.passes for image in images}
    assert all(np.isfinite(image.history.entropy).all() for image in images)


def test_cancelled_images_free_their_slots_before_the_next_pass(pipe: Pipeline) -> None:
    scheduler = Scheduler(pipe, slots=1)
    first, second, third = scheduler.add(pipe.request("fox", seed=1, num_images_per_prompt=3))
    scheduler.step()
    scheduler.cancel([first, second])
    step = scheduler.step()
    assert set(step.finished) == {first, second} and {i.status for i in step.finished} == {"cancelled"}
    assert [image for image, _ in step.results] == [third] and third.status == "running"
    assert first.history.passes > 0 and not first.history.done and second.history.passes == 0
    drain(scheduler)
    scheduler.cancel([third])
    assert scheduler.step().finished == [] and third.status == "finished"


def test_a_failure_stays_with_its_image(pipe: Pipeline) -> None:
    request = pipe.request(["red fox", "ghost", "blue"], seed=3)
    expected = tokens_alone(pipe, request)
    make_prompt = pipe.model.make_prompt

    def fail_for_ghosts(text: str, *rest: object) -> object:
        if text == "ghost":
            raise RuntimeError("no ghosts")
        return make_prompt(text, *rest)  # type: ignore[arg-type]

    object.__setattr__(pipe.model, "make_prompt", fail_for_ghosts)
    scheduler = Scheduler(pipe, slots=3)
    fox, ghost, blue = scheduler.add(request)
    drain(scheduler)
    assert ghost.status == "failed" and str(ghost.error) == "no ghosts"
    assert [fox.history.tokens.tolist(), blue.history.tokens.tolist()] == [expected[0], expected[2]]
    assert fox.error is None and fox.status == blue.status == "finished"


def test_threads_may_add_and_cancel_while_one_steps(pipe: Pipeline) -> None:
    scheduler, images = Scheduler(pipe, slots=2), []

    def ask(seed: int) -> None:
        added = scheduler.add(pipe.request("fox", seed=seed))
        images.extend(added)
        if seed % 3 == 0:
            scheduler.cancel(added)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
        scheduler.step()
    for thread in threads:
        thread.join()
    drain(scheduler)
    assert all(image.is_done for image in images) and len(images) == 9
    for image in images:
        if image.status == "finished":
            assert image.history.tokens.tolist() == tokens_alone(pipe, image.request)[0]


def test_newcomers_do_not_starve_running_images(pipe: Pipeline) -> None:
    """However many wait for free slots, few are prefilled between two passes, and those that run go on."""
    scheduler = Scheduler(pipe, slots=24)
    running = set(scheduler.add(pipe.request("fox", seed=0, num_images_per_prompt=2)))
    scheduler.step()
    newcomers = scheduler.add(pipe.request("ghost", seed=2, num_images_per_prompt=20))
    for expected in (8, 16, 20):
        ran = {image for image, _ in scheduler.step().results}
        assert running <= ran and ran - running == set(newcomers[:expected])
    drain(scheduler)
    assert newcomers[19].history.tokens.tolist() == tokens_alone(pipe, newcomers[19].request)[0]


def test_windows_shrink_by_the_cost_curve_as_the_batch_grows(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the passes of a scheduler, and for `generate --prompts`, which draws as many at once as it has slots."""
    costs = WindowCosts(((1, 10.0), (8, 10.2), (16, 10.5), (32, 12.0), (64, 20.0)))
    monkeypatch.setattr(autotune, "load_or_measure_windows", lambda workload: costs)
    pipe = Pipeline.from_pretrained(small_model, drafter="jacobi")
    nodes = []
    for images in (1, 4, 16):
        scheduler = Scheduler(pipe, slots=16)
        scheduler.add(pipe.request("fox", seed=1, num_images_per_prompt=images))
        (plan,) = {result.plan for _, result in scheduler.step().results}
        nodes.append(plan.nodes)
    assert nodes[0] > nodes[1] > nodes[2], nodes
    worker = ImageWorker(pipe, WorkerOptions({}, {}, slots=16))
    tree = policies.build(worker.describe().tree)
    assert tree.plan(History(pipe.model.make_layout(pipe.model.sizes[0])), 0).nodes == nodes[-1]


def test_closing_cancels_and_refuses(pipe: Pipeline) -> None:
    scheduler = Scheduler(pipe, slots=1)
    images = scheduler.add(pipe.request("fox", num_images_per_prompt=2))
    scheduler.step()
    scheduler.close()
    assert [image.status for image in images] == ["cancelled"] * 2 and not scheduler.has_work
    with pytest.raises(ConfigError, match="closed"):
        scheduler.add(pipe.request("fox"))


def test_bad_requests_are_refused_before_they_are_queued(pipe: Pipeline) -> None:
    for slots in (0, "4", 2.5):
        with pytest.raises(ConfigError, match="at least 1"):
            Scheduler(pipe, slots=slots)  # type: ignore[arg-type]
    scheduler = Scheduler(pipe)
    for request in ("a fox", None, pipe("fox", seed=1, output_type="codes")):
        with pytest.raises(ConfigError, match="takes a request"):
            scheduler.add(request)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cancel\(\) takes the images that add\(\) returned, not ScheduledImage"):
        scheduler.cancel(scheduler.add(pipe.request("fox"))[0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cancel\(\) takes the images that add\(\) returned, not \[\[1\]\]"):
        scheduler.cancel([[1]])  # type: ignore[list-item]
    pipe.verifier, pipe.proposal = "rejection", "coupled"
    with pytest.raises(ConfigError, match="bias"):
        Scheduler(pipe)


def test_partial_images_show_the_cells_drawn_so_far(pipe: Pipeline) -> None:
    scheduler = Scheduler(pipe, slots=2)
    image, waiting = scheduler.add(pipe.request("fox", seed=1)) + scheduler.add(pipe.request("ghost", seed=2))
    assert set(pipe.decode_images([waiting.history], "np").flatten().tolist()) == {np.float32(128 / 255)}
    while image.history.passes < 8:
        scheduler.step()
    partial = pipe.decode_images([image.history], "np")[0]  # (H, W, 3)
    is_grey = (partial == np.float32(128 / 255)).all(-1)
    size, drawn = pipe.model.image_tokenizer.downsample, image.history.grid("tokens") >= 0
    assert np.array_equal(is_grey, ~drawn.repeat(size, 0).repeat(size, 1)) and 0 < is_grey.sum() < is_grey.size


def test_calls_with_many_images_draw_them_in_turns(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The images are those of one batch, whatever the number of slots is; callbacks see every pass."""
    prompts = ["red fox", "ghost", "a blue render", "purple background", "fox"]
    expected = pipe(prompts, seed=7, output_type="codes")
    counts: list[int] = []
    original = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda self: (original(self), counts.append(self.running))[0])
    pipe.max_batch, calls = 2, []
    out = pipe(prompts, seed=7, callback_on_step_end=lambda *call: calls.append(call[3]))
    assert out.complete and out.seeds == expected.seeds and out.prompts == prompts
    drawn = [history.tokens.tolist() for history in out.histories]
    assert drawn == [history.tokens.tolist() for history in expected.histories]
    assert len(calls) == sum(history.passes for history in out.histories)
    assert max(counts) == 2 and counts.count(2) > counts.count(1), "a free slot is filled at once"
    for details in calls:
        assert details["history"] is out.histories[details["step"].sequence]


def test_streams_of_many_images_record_in_the_histories_of_the_caller(pipe: Pipeline) -> None:
    request = pipe.request(["fox", "ghost", "red fox"], seed=3)
    histories = [History(pipe.model.make_layout(request.size)) for _ in range(4)]
    pipe.max_batch = 2
    passes = list(pipe.stream(request, histories[1:]))
    assert [history.done for history in histories] == [False, True, True, True]
    assert [history.seed for history in histories[1:]] == request.seeds
    assert len(passes) == sum(history.passes for history in histories)
    with pytest.raises(ConfigError, match="must be new ones"):
        list(pipe.stream(request, histories[1:]))


def test_calls_with_many_images_can_be_interrupted_and_fail(pipe: Pipeline) -> None:
    pipe.max_batch = 2
    out = pipe(["fox"] * 4, seed=7, callback_on_step_end=lambda pipe, *rest: pipe.interrupt())
    assert not out.complete and len(out.images) == 4
    object.__setattr__(pipe.model, "make_prompt", lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe(["fox"] * 4)


def test_plain_decoding_shares_captured_passes(pipe: Pipeline) -> None:
    pipe.graphs = GraphCache(capture=EagerPass)
    assert pipe.plain().graphs is pipe.graphs
    assert pipe.plain()("fox", seed=1).images[0].tobytes() == pipe("fox", seed=1).images[0].tobytes()


def test_images_of_several_sizes(pipe: Pipeline) -> None:
    """All sizes run in every step: in one batch, or, under proposals that cannot mix them, in a batch of their own."""
    square, wide = ImageSize(12, 12), ImageSize(8, 12)
    codes = pipe.model.make_layout(square).codes
    object.__setattr__(pipe.model, "sizes", (square, wide))
    object.__setattr__(pipe.model, "make_layout", lambda size: Layout(size.height // 2, size.width // 2, codes))
    requests = [pipe.request("red fox", seed=seed, height=height) for seed, height in enumerate((12, 8, 12, 8))]
    for drafter, batches in (("jacobi-tree", 1), ("drafter", 2)):
        pipe.drafter = drafter
        scheduler = Scheduler(pipe, slots=3)
        images = [scheduler.add(request)[0] for request in requests]
        assert {image.history.layout.height for image, _ in scheduler.step().results} == {6, 4}
        assert len(scheduler._batches) == batches
        drain(scheduler)
    for image, request in zip(images, requests, strict=True):
        assert image.history.tokens.tolist() == tokens_alone(pipe, request)[0]
        assert pipe.decode_images([image.history])[0].size == (12, request.size.height)


def test_sizes_that_the_prompt_names_share_passes(tmp_path: Path) -> None:
    """Lumina-mGPT: size tokens before the image, row ends, and many sizes."""
    folder = tmp_path / "lumina" / "Lumina-mGPT-tiny-128"
    checkpoint_writers.write_lumina(folder)
    pipe = Pipeline.from_pretrained(folder, drafter="jacobi-tree", tree="chain:depth=5")
    sides = ((160, 64), (64, 160), (128, 96))
    requests = [pipe.request("fox", seed=seed, height=h, width=w) for seed, (h, w) in enumerate(sides)]
    scheduler = Scheduler(pipe, slots=3)
    images = [scheduler.add(request)[0] for request in requests]
    assert len(scheduler.step().results) == 3 and len(scheduler._batches) == 1
    drain(scheduler)
    for image, request in zip(images, requests, strict=True):
        assert image.history.tokens.tolist() == tokens_alone(pipe, request)[0]


def test_newcomers_wait_for_each_other_but_not_for_long(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many slots, one free slot is filled together with the next one, or after a few passes."""
    monkeypatch.setattr(scheduler_module, "_SLOTS_PER_NEWCOMER", 2)
    monkeypatch.setattr(scheduler_module, "_PATIENCE", 3)
    pipe.tree = "none"
    scheduler = Scheduler(pipe, slots=4)
    first = scheduler.add(pipe.request("fox", seed=1, num_images_per_prompt=4))
    scheduler.step()
    later = scheduler.add(pipe.request("fox", seed=5, num_images_per_prompt=2))
    scheduler.cancel(first[:1])
    counts = [len(scheduler.step().results) for _ in range(5)]
    assert counts == [3, 3, 3, 4, 4], "one newcomer after three passes"
    scheduler.cancel(first[1:3])
    assert len(scheduler.step().results) == 3 and later[1].status == "running", "the last one need not wait"
    drain(scheduler)
    assert later[1].history.tokens.tolist() == tokens_alone(pipe, pipe.request("fox", seed=6))[0]


def test_a_policy_that_raises_fails_its_image_alone(pipe: Pipeline) -> None:
    class FailsForSeed2:
        def plan(self, history: History, step: int) -> TreePlan:
            if history.seed == 2 and step > 4:
                raise RuntimeError("no plan")
            return TreePlan(2, 1, 1, 3)

    pipe.tree = FailsForSeed2()
    scheduler = Scheduler(pipe, slots=3)
    images = scheduler.add(pipe.request("fox", seed=1, num_images_per_prompt=3))
    drain(scheduler)
    assert [image.status for image in images] == ["finished", "failed", "finished"]
    assert str(images[1].error) == "no plan"


def test_stream_in_slots_records_in_the_callers_histories(pipe: Pipeline) -> None:
    """Also in those of a slice of a list, as benchmarks pass them."""
    pipe.max_batch = 2
    request = pipe.request(["fox", "ghost", "red fox"], seed=[3, 4, 5])
    histories = [History(pipe.model.make_layout(request.size)) for _ in range(4)]
    for _ in pipe.stream(request, histories[1:]):
        pass
    assert not histories[0].passes
    assert all(history.done and history.passes for history in histories[1:])
    assert [history.seed for history in histories[1:]] == [3, 4, 5]
