"""What an operator sees: keys, health, metrics, log lines, memory, and the command's options."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import socket
from pathlib import Path

import httpx
import pytest
import small_checkpoint
from commands import call
from running_server import PROMPT, RunningServer, run_server

from underdraw import Pipeline
from underdraw.engine.scheduler import ScheduledImage
from underdraw.serving.engine_thread import Job

GENERATE = "/v1/images/generations"
KEY = "correct horse battery"


def post(server: RunningServer, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    return httpx.post(server.url + GENERATE, json={"prompt": PROMPT, **body}, headers=headers, timeout=60)


def test_api_key(served_model: Path) -> None:
    with run_server(
        Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2"), api_key=KEY
    ) as running:
        wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"})
        for headers in wrong:
            answer = post(running, headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        assert httpx.post(f"{running.url}/draw", json={"prompt": PROMPT}).status_code == 401
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        assert httpx.get(running.url).status_code == 200  # the page asks for the key
        assert post(running, {"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_health_follows_the_engine(served_model: Path) -> None:
    with run_server(Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2")) as running:
        assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
        running.engine.failures = 3
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        assert post(running).status_code == 200  # a step that works again ends the alarm
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        running.engine.drain()
        assert httpx.get(f"{running.url}/health/live").status_code == 200
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        assert post(running).status_code == 503


def test_metrics_count(server: RunningServer) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    before = read()
    assert post(server, n=2).status_code == 200
    assert post(server, n=0).status_code == 400
    after = read()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown['underdraw_images_total{status="finished"}'] == 2
    assert grown["underdraw_tokens_total"] == 2 * 35 == grown["underdraw_tokens_per_pass_sum"]
    assert 2 <= grown["underdraw_passes_total"] <= 70
    assert grown['underdraw_requests_total{route="/v1/images/generations",status="400"}'] == 1
    assert grown["underdraw_draw_seconds_count"] == grown["underdraw_queue_seconds_count"] == 2
    assert after["underdraw_slots"] == 4 and after["underdraw_images_running"] == 0


@pytest.mark.parametrize("log_prompts", [False, True])
def test_log_lines(served_model: Path, caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    """A line per request with its id; the prompt only if asked for, words that the model does not know included."""
    caplog.set_level(logging.INFO, "underdraw")
    pipe = Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2")
    with run_server(pipe, log_prompts=log_prompts) as running:
        post(running, {"X-Request-Id": "mine-17"}, prompt="a secret zebra")
        answer = post(running, {"X-Request-Id": "not\tallowed"})
    assert answer.headers["x-request-id"].startswith("req_")
    (line,) = [record.getMessage() for record in caplog.records if "mine-17" in record.getMessage()]
    assert "POST /v1/images/generations 200" in line and "images=1" in line
    assert ("a secret zebra" in caplog.text) == log_prompts


def test_other_origins_are_not_let_in(server: RunningServer) -> None:
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(server.url + GENERATE, headers=headers)
    assert answer.status_code == 405
    for reply in (answer, post(server, headers)):
        assert not [name for name in reply.headers if name.startswith("access-control")]
    form = httpx.post(server.url + GENERATE, content=b'{"prompt": "fox"}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 400  # what a foreign page could send without asking


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.parametrize("requests", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_memory_stays_flat(tmp_path: Path, requests: int) -> None:
    model = small_checkpoint.write(tmp_path / "model", side=3, drafter=False)  # 9 cells: many images in little time
    pipe = Pipeline.from_pretrained(model, drafter="jacobi", tree="chain:depth=8")
    with run_server(pipe, slots=8, queue=200) as running, concurrent.futures.ThreadPoolExecutor(8) as pool:

        def draw(count: int) -> None:
            answers = pool.map(lambda seed: post(running, seed=seed).status_code, range(count))
            assert set(answers) == {200}

        draw(40)
        before = resident_megabytes()
        draw(requests)
        assert resident_megabytes() - before < 12
        assert running.engine.is_idle
        httpx.get(running.url)  # the event loop has left the last request behind
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item) in (Job, ScheduledImage)]


def test_command_reports_bad_options_and_an_occupied_port(served_model: Path) -> None:
    for words, message in (
        (["--slots", 0], "--slots 0 is out of range; use 1 to 256."),
        (["--port", 99999], "--port 99999 is out of range"),
        (["--timeout", 0], "--timeout 0.0 is not allowed"),
        (["--api-key", "short"], "the API key must have at least 8 characters"),
    ):
        done = call("serve", *words)
        assert done.code == 2 and message in done.err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = call("serve", "--model", served_model, "--port", other.getsockname()[1])
    assert done.code == 2 and "cannot listen on 127.0.0.1 port" in done.err
