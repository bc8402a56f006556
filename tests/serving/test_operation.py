"""What an operator sees: keys, health, metrics, log lines, memory, and the command's options."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import small_checkpoint
from commands import TERMINATED_ON_LOAD, call, start
from running_server import PROMPT, RunningServer, run_server

from underdraw import Pipeline
from underdraw.engine.scheduler import ScheduledImage, Scheduler, SchedulerStep
from underdraw.errors import ConfigError
from underdraw.request import GenerationRequest
from underdraw.serving.engine_thread import Job, TreeScheduler
from underdraw.serving.server import serve
from underdraw.serving.settings import ServerSettings

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
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        assert httpx.get(f"{running.url}/v1/nothing").status_code == 401
        counts = httpx.get(f"{running.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        assert 'requests_total{route="/v1/images/generations",status="401"} 4.0' in counts
        assert 'requests_total{route="other",status="401"} 1.0' in counts
        assert httpx.post(f"{running.url}/draw", json={"prompt": PROMPT}).status_code == 401
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        assert httpx.get(running.url).status_code == 200  # the page asks for the key
        assert httpx.head(running.url).status_code == 200 and not httpx.head(running.url).content
        assert post(running, {"Authorization": f"Bearer {KEY}"}).status_code == 200


def test_health_follows_the_engine(served_model: Path) -> None:
    with run_server(Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2")) as running:
        assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
        for path in ("/health", "/health/live", "/health/ready"):
            assert httpx.head(running.url + path).status_code == 200  # some load balancers ask so
        running.engine.failures = 3
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        assert post(running).status_code == 200  # a step that works again ends the alarm
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        running.engine.drain()
        assert httpx.head(f"{running.url}/health/ready").status_code == 503
        assert httpx.get(f"{running.url}/health/live").status_code == 200
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        assert post(running).status_code == 503


def test_refused_requests_do_not_make_the_server_unready(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models refuse a prompt only when they tokenize it, in the engine's thread."""

    def refuse(request: GenerationRequest) -> None:
        raise ConfigError("this model takes no such prompt.")

    monkeypatch.setattr(server.engine.pipe, "prompts", refuse)
    for _ in range(4):
        assert post(server).status_code == 400
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


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
    assert grown['underdraw_request_seconds_count{route="/v1/images/generations"}'] == 2
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
        httpx.get(f"{running.url}/health/ready", headers={"X-Request-Id": "probe"})
    assert answer.headers["x-request-id"].startswith("req_")
    (line,) = [record.getMessage() for record in caplog.records if "mine-17" in record.getMessage()]
    assert "POST /v1/images/generations 200" in line and "images=1" in line
    assert ("a secret zebra" in caplog.text) == log_prompts
    assert "probe" not in caplog.text, "probes would fill the log"


def test_other_origins_are_not_let_in(server: RunningServer) -> None:
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(server.url + GENERATE, headers=headers)
    assert answer.status_code == 405
    for reply in (answer, post(server, headers)):
        assert not [name for name in reply.headers if name.startswith("access-control")]
    form = httpx.post(server.url + GENERATE, content=b'{"prompt": "fox"}', headers={"Content-Type": "text/plain"})
    assert form.status_code == 400  # what a foreign page could send without asking


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200), ("LOCALHOST.", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("draw.example.org", 200),
        ("rebound.example", 403), ("127.0.0.1.rebound.example:8000", 403), ("localhost.rebound.example", 403),
        ("[::2]", 403), ("", 403),
    ],
)  # fmt: skip
def test_names_that_were_rebound_to_loopback_are_refused(served_model: Path, host: str, status: int) -> None:
    settings = ServerSettings(allowed_hosts=("draw.example.org",))
    assert settings.accepts_host(host) == (status == 200)
    assert ServerSettings().accepts_host(host) == (status == 200 and host != "draw.example.org")
    assert ServerSettings(host="0.0.0.0").accepts_host(host), "other machines call it by any name"
    assert ServerSettings(host="0.0.0.0", allowed_hosts=("draw.example.org",)).accepts_host(host) == (status == 200)


def test_server_that_is_open_to_all_says_so() -> None:
    cases = {"127.0.0.1": ("127.0.0.1", False), "0.0.0.0": ("127.0.0.1", True), "::": ("[::1]", True)}
    cases |= {"10.1.2.3": ("10.1.2.3", True), "::1": ("[::1]", False), "localhost": ("localhost", False)}
    for host, expected in cases.items():
        settings = ServerSettings(host=host)
        assert (settings.address, settings.is_open_to_all) == expected
        assert not ServerSettings(host=host, api_key="long enough").is_open_to_all


def test_refused_host_gets_one_clear_answer(server: RunningServer) -> None:
    for path, method in (("/", "GET"), ("/health/ready", "GET"), (GENERATE, "POST"), ("/draw", "POST")):
        answer = httpx.request(method, server.url + path, headers={"Host": "rebound.example"})
        error = answer.json()["error"]
        assert (
            answer.status_code == 403 and error["code"] == "host_not_allowed" and "--allowed-host" in error["message"]
        )
    assert server.engine.is_idle


def test_warm_up_comes_before_ready(served_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its end, requests and /health/ready get 503; its passes are no requests in the metrics."""
    reached, go_on, passes = threading.Event(), threading.Event(), []
    original = Scheduler.step

    def step(scheduler: Scheduler) -> SchedulerStep:
        passes.append(original(scheduler))
        if len(passes) == 2:
            reached.set()
            assert go_on.wait(30)
        return passes[-1]

    monkeypatch.setattr(Scheduler, "step", step)
    pipe = Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2")
    with run_server(pipe, warm_up=True, slots=3, wait=False) as running:
        assert reached.wait(30)
        assert httpx.get(f"{running.url}/health/live").status_code == 200
        assert httpx.get(f"{running.url}/health/ready").status_code == 503
        early = post(running)
        assert early.status_code == 503 and early.json()["error"]["code"] == "warming_up"
        assert int(early.headers["retry-after"]) >= 1 and not running.is_ready.is_set()
        go_on.set()
        assert running.is_ready.wait(30)
        assert {len(step.results) for step in passes} == {0, 1, 3}, "passes with one image and with all slots in use"
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        assert "underdraw_images_total{" not in httpx.get(f"{running.url}/metrics").text
        assert post(running, n=3).status_code == 200


def test_warm_up_that_fails_or_is_interrupted_ends_the_server(
    served_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2")
    with run_server(pipe, warm_up=True, wait=False) as running:
        running.server.handle_exit(2, None)  # Ctrl-C at once
        running.thread.join(30)
        assert not running.thread.is_alive() and not running.is_ready.is_set()
    monkeypatch.setattr(pipe, "prompts", lambda request: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        serve(pipe, ServerSettings(port=0), lambda *ready: pytest.fail("not ready"))
    caught.value.with_traceback(None)  # it keeps the images of the warm-up alive


def test_sigterm_while_the_model_is_loaded(served_model: Path, tmp_path: Path) -> None:
    """The server ends as it does once it draws."""
    process = start("serve", "--model", served_model, "--port", 0, cwd=tmp_path, program=TERMINATED_ON_LOAD)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "stopped.\n") and "Traceback" not in err


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
        growth = []
        while len(growth) < 3 and min(growth, default=12.0) >= 12:  # a leak grows in every round, an allocator does not
            before = resident_megabytes()
            draw(requests)
            growth.append(resident_megabytes() - before)
        assert min(growth) < 12, growth
        assert running.engine.is_idle
        httpx.get(running.url)  # the event loop has left the last request behind
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item) in (Job, ScheduledImage)]


def test_command_reports_bad_options_and_an_occupied_port(served_model: Path) -> None:
    for words, message in (
        (["--slots", 0], "--slots 0 is out of range; use 1 to 256."),
        (["--port", 99999], "--port 99999 is out of range"),
        (["--host", ""], "--host is empty"),
        (["--timeout", 0], "--timeout 0.0 is not allowed"),
        (["--allowed-host", "http://a.org"], "--allowed-host 'http://a.org' is not a name or an address"),
        (["--api-key", "short"], "the API key must have at least 8 characters"),
    ):
        done = call("serve", *words)
        assert done.code == 2 and message in done.err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = call("serve", "--model", served_model, "--port", other.getsockname()[1])
    assert done.code == 2 and "cannot listen on 127.0.0.1 port" in done.err


def test_empty_api_key_of_the_environment_is_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where $(openssl rand -hex 24) printed nothing, for want of openssl."""
    monkeypatch.setenv("UNDERDRAW_API_KEY", "")
    done = call("serve", "--host", "0.0.0.0")
    assert done.code == 2 and "UNDERDRAW_API_KEY is empty; set it" in done.err


def test_race_after_race_gets_equal_shares(served_model: Path) -> None:
    """What plain decoding took longer in earlier races does not make it wait in the next one, nor the other way."""
    pipe = Pipeline.from_pretrained(served_model, drafter="jacobi", tree="chain:depth=2")
    with run_server(pipe, slots=4) as running:
        assert post(running, tree="none").status_code == post(running).status_code == 200
        engine, passes = running.engine, []
        schedulers, step = engine._schedulers, engine._step
        for ahead, behind in (("none", "auto"), ("auto", "none")):
            schedulers[ahead].seconds, schedulers[behind].seconds = 50.0, 1.0
            passes.clear()

            def step_and_wait(entry: TreeScheduler, behind: str = behind, ahead: str = ahead) -> None:
                """The first request waits after its first pass until the second has come."""
                step(entry)
                passes.append(behind if entry is schedulers[behind] else ahead)
                while len(passes) == 1 and not schedulers[ahead].scheduler.has_work:
                    time.sleep(0.0005)

            engine._step = step_and_wait  # type: ignore[method-assign]
            with concurrent.futures.ThreadPoolExecutor() as pool:
                first = pool.submit(post, running, tree=behind, n=4)
                while not passes:
                    time.sleep(0.0005)
                second = pool.submit(post, running, tree=ahead, n=4)
                assert first.result().status_code == second.result().status_code == 200
            assert behind in passes[passes.index(ahead) :], "the one that ran less until now does not run to its end"
