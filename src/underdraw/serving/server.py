"""Runs the application with uvicorn: one line when it is ready; signals finish what is drawn and then end it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from underdraw.errors import ConfigError
from underdraw.pipeline import Pipeline
from underdraw.serving.app import create_app
from underdraw.serving.engine_thread import EngineThread
from underdraw.serving.pictures import public_name
from underdraw.serving.settings import ServerSettings

log = logging.getLogger(__name__)
FLUSH_SECONDS = 5.0  # that answers may take to leave after the last image


class DrainingServer(uvicorn.Server):
    """The first signal drains: requests with an image in a slot are finished, others refused. The second cancels."""

    def __init__(self, config: uvicorn.Config, engine: EngineThread, on_ready: Callable[[int], None]) -> None:
        super().__init__(config)
        self.engine, self.on_ready = engine, on_ready
        self._signals = 0
        self._is_announced = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if not self._is_announced and self.engine.is_ready:
            self._is_announced = True
            self.on_ready(self.servers[0].sockets[0].getsockname()[1])
        if self._signals == 1 and not self.engine.is_draining:
            self.engine.drain()
            if not self.engine.is_idle:
                print("finishing what is being drawn; once more to stop now.", file=sys.stderr, flush=True)
        if self._signals > 1:
            self.engine.cancel_all()
        if (self._signals and self.engine.is_idle) or self.engine.warm_up_error is not None:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(pipe: Pipeline, settings: ServerSettings, on_ready: Callable[[str, float | None], None]) -> None:
    """Serve until a signal; `on_ready` gets the address of the page and the seconds of the warm-up, if there was one.

    Raises the exception of a warm-up that failed.
    """
    listener = bind(settings)
    pipe = with_public_names(pipe)
    if not settings.log_prompts:  # it repeats the words of prompts
        logging.getLogger("underdraw.models.family").setLevel(logging.ERROR)
    app, engine = create_app(pipe, settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=int(FLUSH_SECONDS)
    )
    if settings.is_open_to_all:
        log.warning(
            "listening on %s: everybody who can reach this machine can draw; --api-key asks for a key.",
            settings.host,
        )

    def announce(port: int) -> None:
        on_ready(f"http://{settings.address}:{port}/", engine.warm_up_seconds)

    server = DrainingServer(config, engine, announce)
    asyncio.run(server.serve([listener]))
    if engine.warm_up_error is not None:
        raise engine.warm_up_error


def bind(settings: ServerSettings) -> socket.socket:
    """A listening socket, so that an occupied port is reported before anything else happens."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        address = f"{settings.host} port {settings.port}"
        raise ConfigError(f"cannot listen on {address} ({error.strerror}); choose another --port or --host.") from None
    return listener


def with_public_names(pipe: Pipeline) -> Pipeline:
    """The pipeline with a model name that tells clients nothing of the server's folders."""
    pipe.model = dataclasses.replace(pipe.model, name=public_name(pipe.model.name))
    return pipe
