"""From the options of a body to a job of the engine, and from its events to an answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from underdraw.errors import ConfigError
from underdraw.models.family import LoadedModel
from underdraw.request import GenerationRequest
from underdraw.serving.engine_thread import EngineThread, Event, Failed, Finished, Job
from underdraw.serving.errors import ApiError, drawing_failed
from underdraw.serving.schemas import DrawingOptions

log = logging.getLogger(__name__)
MAX_LISTED = 24  # sizes that an error lists before it counts the rest
HEARTBEAT = 10.0  # seconds without an event after which a comment keeps proxies from closing a stream
GRACE = 10.0  # seconds after the deadline in which a stream can send that it has passed


def build_request(engine: EngineThread, options: DrawingOptions, images: int = 1) -> GenerationRequest:
    """The validated request of a body; raises ApiError with the field to blame."""
    pipe, (height, width) = engine.pipe, options.height_width()
    try:
        pipe.model.resolve_size(height, width)
    except ConfigError:
        raise _unsupported_size(pipe.model, options.size) from None
    try:
        if options.negative_prompt is not None:
            pipe.model.check_prompt(options.negative_prompt)
    except ConfigError as error:
        raise ApiError(400, str(error), param="negative_prompt", code="invalid_value") from None
    try:
        return pipe.request(
            options.prompt,
            negative_prompt=options.negative_prompt,
            height=height,
            width=width,
            guidance_scale=options.guidance_scale,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            num_images_per_prompt=images,
            seed=options.seed,
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param=_blamed(str(error)), code="invalid_value") from None


def _unsupported_size(model: LoadedModel, size: str | None) -> ApiError:
    names = [f"{size.width}x{size.height}" for size in model.sizes]
    allowed = ", ".join(names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        allowed += f" or one of {len(names) - MAX_LISTED} more"
    if model.size_range is not None:
        allowed += f", or any {model.size_range}"
    if size in (None, "auto"):
        message = f"size is missing: this model has no default; it has {allowed}."
        return ApiError(400, message, param="size", code="missing_required_parameter")
    return ApiError(400, f"size {size} is not one of this model's: {allowed}.", param="size", code="invalid_value")


def _blamed(message: str) -> str:
    """The field that a ConfigError of a request speaks of; its first word, or the prompt."""
    name = message.split()[0]
    if name == "guidance":
        return "guidance_scale"
    return name if name in ("temperature", "top_k", "top_p", "seed") else "prompt"


def timed_out(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} seconds.", code="timeout")


async def read_events(job: Job, timeout: float) -> AsyncIterator[Event | None]:
    """The events of a job until all of its images have ended; None where nothing happened for a while.

    Raises ApiError when the deadline passes or an image fails.
    """
    deadline, left = anyio.current_time() + timeout, len(job.images)
    while left:
        wait = min(HEARTBEAT, deadline - anyio.current_time())
        if wait <= 0:
            raise timed_out(timeout)
        try:
            event = await asyncio.wait_for(job.events.get(), wait)
        except asyncio.TimeoutError:
            yield None
            continue
        if isinstance(event, Failed):
            raise event.error
        left -= isinstance(event, Finished)
        yield event


async def watch_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the scope when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def collect(engine: EngineThread, job: Job, receive: Receive, timeout: float) -> list[Finished] | None:
    """The finished images of a job in order, or None if the client went away, which cancels the job."""
    finished: dict[int, Finished] = {}
    failure: ApiError | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch_disconnect, receive, group.cancel_scope)
            try:
                async for event in read_events(job, timeout):
                    if isinstance(event, Finished):
                        finished[event.image.index] = event
            except ApiError as error:  # a task group would wrap it
                failure = error
            group.cancel_scope.cancel()
    finally:
        engine.cancel(job)
    if failure is not None:
        raise failure
    complete = len(finished) == len(job.images)
    return [finished[index] for index in range(len(finished))] if complete else None


class EventStream(Response):
    """Server-sent events of a job. The job is cancelled when the client goes away or its time is up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        engine: EngineThread,
        job: Job,
        timeout: float,
        encode: Callable[[Event | None], AsyncIterator[tuple[str, dict[str, Any]]]],
        first: list[tuple[str, dict[str, Any]]] | None = None,
    ) -> None:
        """`encode` turns an event of the engine, or None for none in a while, into named events of the stream.

        `first` are sent before them.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.engine, self.job, self.timeout, self.encode, self.first = engine, job, timeout, encode, first or []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.cancel_scope.deadline = anyio.current_time() + self.timeout + GRACE  # of clients that do not read
                group.start_soon(watch_disconnect, receive, group.cancel_scope)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                error = await self._send_events(lambda text: _send_text(send, text))
                if error is not None:  # the status was 200 all the same
                    scope["state"]["log"] = f"{scope['state'].get('log', '')} error={error.code}"
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                group.cancel_scope.cancel()
        finally:
            self.engine.cancel(self.job)

    async def _send_events(self, write: Callable[[str], Any]) -> ApiError | None:
        """Send all events; returns the error that ended the stream, if any."""
        failure = None
        for name, data in self.first:
            await write(format_event(name, data))
        try:
            async for event in read_events(self.job, self.timeout):
                if event is None:
                    await write(": still drawing\n\n")
                async for name, data in self.encode(event):
                    await write(format_event(name, data))
        except ApiError as error:
            failure = error
        except Exception as error:  # of encoding a picture: the client has its status already
            log.exception("request %s: an event could not be encoded", self.job.id)
            failure = drawing_failed(error)
        if failure is not None:
            await write(format_event("error", failure.body()))
        await write("data: [DONE]\n\n")
        return failure


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


def format_event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
