"""The ASGI application: routes, health and metrics around one engine thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from underdraw.pipeline import Pipeline
from underdraw.serving import openai_api, page_api
from underdraw.serving.engine_thread import EngineThread
from underdraw.serving.errors import add_handlers
from underdraw.serving.metrics import Metrics
from underdraw.serving.middleware import RequestMiddleware
from underdraw.serving.pictures import fit_palette
from underdraw.serving.settings import ServerSettings


def create_app(pipe: Pipeline, settings: ServerSettings) -> tuple[ASGIApp, EngineThread]:
    """The application and its engine, which starts and stops with the application."""
    engine = EngineThread(pipe, slots=settings.slots, queue=settings.queue, needs_warm_up=settings.warm_up)
    metrics = Metrics(engine)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="underdraw", lifespan=lifespan, openapi_url=None)  # its schema lists errors that are never sent
    app.state.engine, app.state.settings = engine, settings
    app.include_router(openai_api.router)
    if settings.page:
        app.state.palette = fit_palette(pipe.model.image_tokenizer, pipe.device)
        app.include_router(page_api.router)
    add_handlers(app)

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/health/live", methods=["GET", "HEAD"])
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/health/ready", methods=["GET", "HEAD"])
    async def ready(request: Request) -> JSONResponse:
        is_ready = engine.is_ready
        return JSONResponse({"status": "ok" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return RequestMiddleware(app, settings=settings, metrics=metrics), engine
