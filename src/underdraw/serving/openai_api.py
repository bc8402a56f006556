"""OpenAI's images API: POST /v1/images/generations, with streaming, and GET /v1/models."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from underdraw.serving import pictures
from underdraw.serving.drawing import EventStream, build_request, collect
from underdraw.serving.engine_thread import EngineThread, Event, Finished, Job, PartialPicture
from underdraw.serving.errors import ApiError
from underdraw.serving.schemas import ImageRequest
from underdraw.serving.settings import ServerSettings

router = APIRouter(prefix="/v1")
CLIENT_GONE = 499  # nobody reads it, but the log does


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(request.app.state.engine)]}


@router.get("/models/{name:path}")
async def get_model(name: str, request: Request) -> dict[str, Any]:
    _check_model(request.app.state.engine, name)
    return _model_card(request.app.state.engine)


def _model_card(engine: EngineThread) -> dict[str, Any]:
    return {"id": engine.pipe.model.name, "object": "model", "created": 0, "owned_by": "underdraw"}


def _check_model(engine: EngineThread, name: str | None) -> None:
    if name is not None and name != engine.pipe.model.name:
        message = f"this server has the model {engine.pipe.model.name} only."
        raise ApiError(404, message, param="model", code="model_not_found")


@router.post("/images/generations")
async def generate_images(body: ImageRequest, request: Request) -> Response:
    """Draw `n` images; with `stream`, partial images and each image as soon as it is finished."""
    engine: EngineThread = request.app.state.engine
    settings: ServerSettings = request.app.state.settings
    _check_model(engine, body.model)
    job = engine.submit(
        build_request(engine, body, body.images),
        id=request.state.request_id,
        tree=body.tree_policy,
        partial_images=body.partials,
    )
    request.state.log = f" images={body.images}" + (f" prompt={body.prompt!r}" if settings.log_prompts else "")
    answer = ImageAnswer(body, job)
    if body.stream:
        return EventStream(engine, job, settings.timeout, answer.stream_events)
    finished = await collect(engine, job, request.receive, settings.timeout)
    if finished is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(await answer.body(finished))


class ImageAnswer:
    """Builds the answer of one request: JSON, or the data of its events."""

    def __init__(self, body: ImageRequest, job: Job) -> None:
        self.request, self.job = body, job
        self.created = int(time.time())
        size = job.request.size
        self.echo = body.echo(f"{size.width}x{size.height}")
        self._partials: Counter[int] = Counter()  # partial images sent of each image

    async def body(self, finished: list[Finished]) -> dict[str, Any]:
        data = [await self._item(event) for event in finished]
        return {"created": self.created, "data": data, **self.echo, "usage": self._usage(len(finished))}

    async def stream_events(self, event: Event | None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The events of OpenAI's stream; fields of underdraw are under one key."""
        if isinstance(event, PartialPicture):
            name = "image_generation.partial_image"
            data = {
                "b64_json": await self._encode(event.picture),
                "partial_image_index": self._partials[event.image.index],
                "underdraw": {"image": event.image.index, "cells": event.cells},
            }
            self._partials[event.image.index] += 1
        elif isinstance(event, Finished):
            name = "image_generation.completed"
            output = pictures.describe(self.job.pipe, event.image, event.picture)
            data = {
                "b64_json": await self._encode(event.picture, output.metadata()),
                "usage": self._usage(1),
                "underdraw": {"image": event.image.index, **pictures.statistics(output)},
            }
        else:
            return
        yield name, {"type": name, **data, "created_at": self.created, **self.echo}

    async def _item(self, event: Finished) -> dict[str, Any]:
        output = pictures.describe(self.job.pipe, event.image, event.picture)
        encoded = await self._encode(event.picture, output.metadata())
        item: dict[str, Any] = {"b64_json": encoded}
        if self.request.response_format == "url":
            item = {"url": f"data:image/{self.echo['output_format']};base64,{encoded}"}
        return {**item, "underdraw": pictures.statistics(output)}

    async def _encode(self, picture: Any, metadata: dict[str, str] | None = None) -> str:
        quality = 100 if self.request.output_compression is None else self.request.output_compression
        return await asyncio.to_thread(pictures.encode, picture, self.echo["output_format"], quality, metadata)

    def _usage(self, images: int) -> dict[str, Any]:
        text = self.job.prompt_tokens
        drawn = self.job.images[0].history.layout.cells * images
        return {
            "input_tokens": text,
            "input_tokens_details": {"image_tokens": 0, "text_tokens": text},
            "output_tokens": drawn,
            "output_tokens_details": {"image_tokens": drawn, "text_tokens": 0},
            "total_tokens": text + drawn,
        }
