"""A server in a thread of the test's process, with the real socket, uvicorn and engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from underdraw import Pipeline
from underdraw.serving.app import create_app
from underdraw.serving.engine_thread import EngineThread
from underdraw.serving.server import DrainingServer, bind, with_public_names
from underdraw.serving.settings import ServerSettings

PROMPT = "a red fox"


@dataclass(frozen=True)
class RunningServer:
    url: str
    engine: EngineThread
    server: DrainingServer
    thread: threading.Thread
    is_ready: threading.Event


@contextlib.contextmanager
def run_server(pipe: Pipeline, *, wait: bool = True, **settings: Any) -> Iterator[RunningServer]:
    """Serve `pipe` on a free port until the block ends; everything that still runs is then cancelled."""
    options = ServerSettings(port=0, **{"warm_up": False, **settings})
    listener = bind(options)
    app, engine = create_app(with_public_names(pipe), options)
    is_ready = threading.Event()
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    server = DrainingServer(config, engine, lambda port: is_ready.set())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        assert not wait or is_ready.wait(60), "the server did not start"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield RunningServer(url, engine, server, thread, is_ready)
    finally:
        server.handle_exit(2, None)
        server.handle_exit(2, None)
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"
