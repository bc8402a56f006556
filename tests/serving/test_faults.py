"""Clients that go away, images that fail, signals, malformed requests: right answers, and the server still draws."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import logging
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from commands import start
from PIL import Image
from running_server import PROMPT, RunningServer, run_server
from slow_policies import SlowChain

from underdraw import Pipeline
from underdraw.engine.scheduler import Scheduler
from underdraw.sampling import NoiseWindow
from underdraw.serving import engine_thread, pictures
from underdraw.serving.engine_thread import EngineThread, Event, PartialPicture, Pass
from underdraw.serving.errors import ApiError
from underdraw.tree import AcceptedPath, DraftTree
from underdraw.verifiers.exact import Exact

GENERATE = "/v1/images/generations"
FAILING_SEED = 666


@pytest.fixture(scope="module")
def slow_server(served_model: Path) -> Iterator[RunningServer]:
    tree: Any = SlowChain(depth=2, failing_seed=FAILING_SEED)
    with run_server(Pipeline.from_pretrained(served_model, drafter="jacobi", tree=tree), slots=3, queue=3) as running:
        yield running


@pytest.fixture(scope="module")
def pipe(served_model: Path) -> Pipeline:
    return Pipeline.from_pretrained(served_model, tree="none")


def post(server: RunningServer, **body: Any) -> httpx.Response:
    return httpx.post(server.url + GENERATE, json={"prompt": PROMPT, **body}, timeout=60)


def assert_drawn(answer: httpx.Response, pipe: Pipeline, seed: int) -> None:
    """The answer is the picture of that seed."""
    assert answer.status_code == 200, answer.text
    encoded = answer.json()["data"][0]["b64_json"]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    assert np.array_equal(pixels, np.asarray(pipe(PROMPT, seed=seed).images[0]))


def assert_refused(answer: httpx.Response) -> None:
    """The answer has OpenAI's error object, and nothing of the server's insides."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert not re.search(r"Traceback|\.py|/root|/tmp|/secret|/home", answer.text)


def wait_until_idle(server: RunningServer, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not server.engine.is_idle:
        assert time.monotonic() < end, "an image still has its slot"
        time.sleep(0.002)
    assert server.engine.running == server.engine.waiting == 0


@pytest.mark.parametrize("path", [GENERATE, "/draw"])
def test_client_that_goes_away_frees_its_slot(
    slow_server: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a stream: at most the pass that runs and the one that had begun are finished."""
    passes: list[Event] = []
    count = slow_server.engine.on_event
    monkeypatch.setattr(slow_server.engine, "on_event", lambda event: (passes.append(event), count(event))[1])
    body = {"prompt": PROMPT, "seed": 1} | ({"stream": True, "partial_images": 3} if path == GENERATE else {})
    with httpx.stream("POST", slow_server.url + path, json=body) as answer:
        next(answer.iter_lines())
    gone, started = sum(isinstance(event, Pass) for event in passes), time.monotonic()
    wait_until_idle(slow_server)
    assert time.monotonic() - started < 2
    assert sum(isinstance(event, Pass) for event in passes) < min(30, gone + 15)


def test_client_that_hangs_up_before_its_json(slow_server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(slow_server.url + GENERATE, json={"prompt": PROMPT, "n": 3}, timeout=0.15)
    wait_until_idle(slow_server)


def test_cancelled_race_frees_the_slots_of_both_trees(served_model: Path) -> None:
    """Whichever scheduler runs first, each ends its own images only: none keeps a slot for ever."""
    engine = EngineThread(
        Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2"), slots=2, queue=2
    )
    for order in (("auto", "none"), ("none", "auto")):
        jobs = {tree: engine.submit(engine.pipe.request(PROMPT), id=tree, tree=tree) for tree in order}
        entries = [engine._scheduler(tree) for tree in order]
        for entry in entries:
            engine._step(entry)
        assert engine.running == 2
        for tree in order:
            engine.cancel(jobs[tree])
        for entry in reversed(entries):
            engine._step(entry)
        assert engine.running == engine.waiting == 0 and engine.is_idle
        assert not any(entry.scheduler.has_work for entry in entries)


def test_both_pictures_of_a_race_get_previews(served_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineThread(Pipeline.from_pretrained(served_model, drafter="jacobi", tree="none"), slots=2, queue=0)
    monkeypatch.setattr(engine_thread, "PREVIEW_SECONDS", 1000.0)
    shown: list[Event] = []
    engine.on_event = lambda event: shown.append(event) if isinstance(event, PartialPicture) else None
    trees = ("none", "auto")
    jobs = [engine.submit(engine.pipe.request(PROMPT), id=tree, tree=tree, live=True) for tree in trees]
    for _ in range(3):
        for tree in trees:
            engine._step(engine._scheduler(tree))
    assert [event.image for event in shown] == [job.images[0] for job in jobs]


def test_drain_finishes_requests_that_have_begun(served_model: Path) -> None:
    """All pictures of a request are finished if one of them has a slot; requests that only waited are refused."""
    engine = EngineThread(Pipeline.from_pretrained(served_model, drafter="jacobi", tree="none"), slots=2, queue=8)
    request = engine.pipe.request(PROMPT, num_images_per_prompt=3)
    begun, waiting = [engine.submit(request, id=name) for name in ("begun", "waiting")]
    entry = engine._scheduler("auto")
    engine._step(entry)
    assert [image.status for image in begun.images] == ["running", "running", "waiting"]
    engine.drain()
    while not engine.is_idle:
        engine._step(entry)
    assert {image.status for image in begun.images} == {"finished"}
    assert {image.status for image in waiting.images} == {"cancelled"}
    with pytest.raises(ApiError) as caught:
        engine.submit(request, id="new")
    assert caught.value.status_code == 503 and caught.value.code == "shutting_down"


def test_cancelled_images_do_not_fill_the_queue(served_model: Path) -> None:
    """Who cancels and asks again at once finds the place that they had, also if the pass still runs."""
    engine = EngineThread(Pipeline.from_pretrained(served_model, drafter="jacobi", tree="none"), slots=1, queue=0)
    for _ in range(3):
        job = engine.submit(engine.pipe.request(PROMPT), id="again")
        with pytest.raises(ApiError) as caught:
            engine.submit(engine.pipe.request(PROMPT), id="too many")
        assert caught.value.status_code == 429
        engine.cancel(job)


def test_scheduler_that_prefills_is_not_replaced(served_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that clients name share four schedulers; the one whose only image is being prefilled is in use."""
    engine = EngineThread(
        Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2"), slots=8, queue=8
    )
    request = engine.pipe.request(PROMPT)
    trees = ["auto", "none", "chain:depth=1", "chain:depth=3"]
    jobs = [engine.submit(request, id=tree, tree=tree) for tree in trees]
    monkeypatch.setattr(Scheduler, "has_work", False)
    with pytest.raises(ApiError) as caught:
        engine.submit(request, id="fifth", tree="chain:depth=4")
    assert caught.value.status_code == 429
    assert [job.scheduler for job in jobs] == [engine._scheduler(tree).scheduler for tree in trees]


def test_failing_image_leaves_its_neighbours_alone(slow_server: RunningServer, pipe: Pipeline) -> None:
    seeds = [1, FAILING_SEED, 2]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda seed: post(slow_server, seed=seed), seeds))
    assert answers[1].status_code == 500
    assert_refused(answers[1])
    assert_drawn(answers[0], pipe, 1)
    assert_drawn(answers[2], pipe, 2)
    client = openai.OpenAI(base_url=f"{slow_server.url}/v1", api_key="unused", max_retries=0)
    stream = client.images.generate(prompt=PROMPT, stream=True, extra_body={"seed": FAILING_SEED})
    with pytest.raises(openai.APIError, match="drawing failed") as caught:
        list(stream)
    assert caught.value.code == "drawing_failed"


def break_for_seed(stage: str, seed: int, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pictures of one seed fail in a pass, in their decode to pixels, or in the encoding of their file."""
    verify, decode, encode = Exact.verify, pipe.decode_images, pictures.encode

    def check(is_due: bool) -> None:
        if is_due:
            raise RuntimeError("injected: /a/secret/path")

    def broken_verify(verifier: Exact, tree: DraftTree, logits: Any, noise_window: NoiseWindow) -> AcceptedPath:
        check(bool(((noise_window.sampler.seeds == seed) & (noise_window.steps[:, 0] > 9)).any()))
        return verify(verifier, tree, logits, noise_window)

    def broken_decode(histories: Any, *rest: Any) -> Any:
        check(histories[0].seed == seed)
        return decode(histories, *rest)

    def broken_encode(picture: Any, format: Any, quality: int, metadata: dict[str, str] | None = None) -> str:
        check(metadata is not None and metadata["seed"] == str(seed))
        return encode(picture, format, quality, metadata)

    if stage == "pass":
        monkeypatch.setattr(Exact, "verify", broken_verify)
    elif stage == "decode":
        monkeypatch.setattr(pipe, "decode_images", broken_decode)
    else:
        monkeypatch.setattr(pictures, "encode", broken_encode)


@pytest.mark.parametrize("stage", ["pass", "decode", "encode"])
def test_failure_at_every_stage_leaves_neighbours_alone(
    slow_server: RunningServer, pipe: Pipeline, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [1, 404, 2]
    with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor() as pool:
        break_for_seed(stage, 404, slow_server.engine.pipe, patch)
        answers = list(pool.map(lambda seed: post(slow_server, seed=seed), seeds))
        stream = post(slow_server, seed=404, stream=True)
        live = httpx.post(f"{slow_server.url}/draw", json={"prompt": PROMPT, "seed": 404}, timeout=60)
    assert answers[1].status_code == 500
    assert_refused(answers[1])
    for text in (stream.text, live.text):
        assert "event: error" in text and text.endswith("data: [DONE]\n\n") and "secret" not in text
    assert_drawn(answers[0], pipe, 1)
    assert_drawn(answers[2], pipe, 2)
    assert_drawn(post(slow_server, seed=404), pipe, 404)
    assert slow_server.engine.is_ready


def test_crashed_scheduler_is_replaced(
    slow_server: RunningServer, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = slow_server.engine._scheduler("auto").scheduler
    monkeypatch.setattr(scheduler, "step", lambda: 1 / 0)
    answer = post(slow_server, seed=1)
    assert answer.status_code == 500
    assert_refused(answer)
    assert_drawn(post(slow_server, seed=4), pipe, 4)
    assert httpx.get(f"{slow_server.url}/health/ready").status_code == 200


def test_full_queue_and_deadline(
    slow_server: RunningServer, served_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "underdraw")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(post, slow_server, n=6, seed=1)
        while slow_server.engine.waiting < 3:
            time.sleep(0.005)
        refused = post(slow_server)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert_refused(refused)
        assert first.result().status_code == 200
    tree: Any = SlowChain()
    with run_server(Pipeline.from_pretrained(served_model, drafter="jacobi", tree=tree), timeout=0.2) as hurried:
        late = post(hurried, n=4)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        stream = post(hurried, stream=True)
        assert stream.status_code == 200 and '"code":"timeout"' in stream.text
        wait_until_idle(hurried)
    assert re.search(r"generations 504 .* images=4\n(.*\n)*.*generations 200 .* images=1 error=timeout", caplog.text)


def test_sigterm_finishes_what_is_drawn(served_model: Path, tmp_path: Path, pipe: Pipeline) -> None:
    """Under load: every request gets its picture, a 503 or no connection, and the server exits with 0."""
    process = start("serve", "--model", served_model, "--port", 0, "--slots", 4, "--queue", 100, cwd=tmp_path)
    assert process.stdout is not None
    ready = process.stdout.readline()
    url = ready.split()[-1].rstrip("/")
    server: Any = type("Server", (), {"url": url})

    def draw(seed: int) -> httpx.Response | None:
        try:
            return post(server, seed=seed)
        except httpx.ConnectError:
            return None

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(draw, seed) for seed in range(72)]
        while sum(answer.done() for answer in answers) < 4:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        results = [answer.result() for answer in answers]
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert re.match(r"served on cpu, 4 slots, warmed up in \d+\.\d s: page and API at http://127\.0\.0\.1:", ready)
    assert out.strip() == "stopped." and "Traceback" not in err and PROMPT not in err
    drawn = [(seed, answer) for seed, answer in enumerate(results) if answer is not None and answer.status_code == 200]
    refused = [answer for answer in results if answer is not None and answer.status_code != 200]
    assert len(drawn) >= 4 and refused and {answer.status_code for answer in refused} == {503}
    for answer in refused:
        assert_refused(answer)
    for seed, answer in drawn[::4]:
        assert_drawn(answer, pipe, seed)


def malformed_bodies() -> list[bytes]:
    """300 bodies that are wrong in different ways; the same ones every time."""
    chance = random.Random(0)
    values: list[Any] = [
        None,
        True,
        -1,
        10**400,
        1e308,
        "",
        "x" * 50,
        [],
        {},
        [[1]],
        "\ud800",
        "../../etc/passwd",
        -0.5,
    ]
    names = [
        "prompt",
        "n",
        "size",
        "seed",
        "temperature",
        "guidance_scale",
        "top_k",
        "top_p",
        "stream",
        "model",
        "tree",
    ]
    bodies = [
        b"", b"{", b"null", b"[]", b'"fox"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"\x00" * 20,
        b"[" * 100_000, b'{"prompt":' * 5000, b'{"prompt": "a", "prompt": 3}', b'{"seed": ' + b"9" * 6000 + b"}",
    ]  # fmt: skip
    while len(bodies) < 300:
        body = {name: chance.choice(values) for name in chance.sample(names, 5)}
        body["prompt"] = chance.choice([3, None, [], "", " ", {"a": 1}]) if chance.random() < 0.5 else PROMPT
        body[chance.choice(["", "promt", "__class__", "\x00"])] = 1  # at least one field does not exist
        try:
            bodies.append(json.dumps(body).encode())
        except ValueError:  # a number that Python itself refuses to print
            continue
    return bodies


def test_malformed_requests(server: RunningServer, pipe: Pipeline) -> None:
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url) as client:
        for body in malformed_bodies():
            answer = client.post(GENERATE, content=body, headers=headers)
            assert answer.status_code == 400, body[:200]
            assert_refused(answer)
        large = client.post(GENERATE, content=b"x" * 600_000, headers=headers)
        chunked = client.post(GENERATE, content=(b"x" * 10_000 for _ in range(60)), headers=headers)
        assert large.status_code == chunked.status_code == 413
        assert_refused(chunked)
        assert client.post(GENERATE, content=b"prompt=fox").status_code == 400
        for path in ("/nothing", "/page/../app.py", "/page/%2e%2e%2fapp.py", "/docs", "/openapi.json"):
            assert_refused(client.get(path))
        assert client.get(GENERATE).status_code == 405
        assert client.get(GENERATE).json()["error"]["code"] == "method_not_allowed"
    assert server.engine.is_idle
    assert_drawn(post(server, seed=9), pipe, 9)


def test_slow_body_is_not_waited_for(served_model: Path) -> None:
    with run_server(Pipeline.from_pretrained(served_model, drafter="jacobi", tree="none"), body_timeout=0.3) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n"
            head += "Content-Type: application/json\r\n\r\n"
            connection.sendall(head.encode() + b'{"prompt":')
            connection.settimeout(10)
            assert connection.recv(1000).startswith(b"HTTP/1.1 408")
        assert post(running).status_code == 200
