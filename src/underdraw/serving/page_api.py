"""What the page needs: its files, what the model can do, and POST /draw, the passes of one image as they happen."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from underdraw import __version__
from underdraw.history import NO_PASS
from underdraw.serving import pictures
from underdraw.serving.drawing import EventStream, build_request
from underdraw.serving.engine_thread import EngineThread, Event, Finished, Job, PartialPicture, Pass
from underdraw.serving.errors import ApiError
from underdraw.serving.schemas import DrawingOptions
from underdraw.serving.settings import ServerSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

router = APIRouter()
FILES = {path.name: path for path in (Path(__file__).parent / "page").iterdir() if path.suffix != ".py"}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@router.head("/")
@router.get("/")
async def page() -> Response:
    return page_file("index.html")


@router.get("/page/{name}")
async def page_file_route(name: str) -> Response:
    return page_file(name)


def page_file(name: str) -> Response:
    """A file of the page; the names are a fixed list, so no path is ever built from a request."""
    if name not in FILES:
        raise ApiError(404, "there is nothing at this address.", code="unknown_url")
    return FileResponse(FILES[name], media_type=TYPES[FILES[name].suffix], headers={"Cache-Control": "no-cache"})


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """The model, its sizes and defaults, for the page's controls."""
    engine: EngineThread = request.app.state.engine
    pipe, settings = engine.pipe, request.app.state.settings
    defaults = pipe.model.defaults
    layouts = [pipe.model.make_layout(size) for size in pipe.model.sizes]
    return {
        "version": __version__,
        "model": pipe.model.name,
        "family": pipe.model.family,
        "drafter": pictures.public_name(pipe.drafter_name),
        "tree": pipe.tree_name,
        "device": pipe.device.type,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "needs_key": settings.api_key is not None,
        "sizes": [
            {"size": f"{size.width}x{size.height}", "rows": layout.height, "columns": layout.width}
            for size, layout in zip(pipe.model.sizes, layouts, strict=True)
        ],
        "defaults": {"guidance_scale": defaults.guidance, "temperature": defaults.temperature},
    }


@router.post("/draw")
async def draw(body: DrawingOptions, request: Request) -> Response:
    """Draw one image and stream its passes, previews and the finished picture."""
    engine: EngineThread = request.app.state.engine
    settings: ServerSettings = request.app.state.settings
    job = engine.submit(build_request(engine, body), id=request.state.request_id, tree=body.tree_policy, live=True)
    request.state.log = " images=1" + (f" prompt={body.prompt!r}" if settings.log_prompts else "")
    answer = LiveAnswer(job, request.app.state.palette)
    return EventStream(engine, job, settings.timeout, answer.stream_events, [("start", answer.start())])


class LiveAnswer:
    """Builds the events of one live image."""

    def __init__(self, job: Job, palette: NDArray[np.uint8]) -> None:
        self.job, self.palette = job, palette
        self._cells = 0  # that were sent

    def start(self) -> dict[str, Any]:
        request, layout = self.job.request, self.job.images[0].history.layout
        return {
            "seed": request.seeds[0],
            "rows": layout.height,
            "columns": layout.width,
            **self._waiting(),
            "unknown_words": self.job.pipe.model.unknown_words(request.prompts),
            "settings": request.settings(),
        }

    async def stream_events(self, event: Event | None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        if event is None:
            yield "waiting", self._waiting()
        elif isinstance(event, Pass):
            yield "pass", self._pass(event)
        elif isinstance(event, PartialPicture):
            encoded = await asyncio.to_thread(pictures.encode, event.picture, "jpeg", pictures.PREVIEW_QUALITY)
            self.job.preview_is_read = True
            yield "preview", {"cells": event.cells, "image": encoded}
        elif isinstance(event, Finished):
            yield "done", await self._done(event)

    def _waiting(self) -> dict[str, int]:
        """How many images must end before this one gets a slot."""
        return {"ahead": self.job.scheduler.count_ahead(self.job.images[0])}

    def _pass(self, event: Pass) -> dict[str, Any]:
        """The new cells of a pass: their colours and entropies, the plan of the tree and how much was accepted."""
        history, result = event.image.history, event.result
        layout, plan = history.layout, result.plan
        first = result.start if self._cells == 0 else result.start + 1  # the prefill's token comes with the first pass
        steps = [s for s in range(first, result.start + 1 + len(result.tokens)) if layout.cell(s) is not None]
        codes = [int(history.tokens[step]) - layout.codes.start for step in steps]
        self._cells += len(steps)
        return {
            "cells": self._cells,
            "colours": pictures.cell_colours(self.palette, codes),
            "entropy": [_rounded(history.entropy[step]) for step in steps],
            "accepted": result.accepted,
            "depth": plan.depth,
            "width": plan.width,
            "nodes": plan.nodes,
            "seconds": round(result.seconds, 5),
        }

    async def _done(self, event: Finished) -> dict[str, Any]:
        output = pictures.describe(self.job.pipe, event.image, event.picture)
        encoded = await asyncio.to_thread(pictures.encode, event.picture, "png", 100, output.metadata())
        history = event.image.history
        maps = {
            name: [_rounded(value) for value in history.grid(name).flat] for name in ("accepted", "depth", "entropy")
        }
        return {
            "image": encoded,
            "tokens": hashlib.sha256(history.tokens.tobytes()).hexdigest(),
            "prefill_cells": int((history.grid("pass_index") == NO_PASS).sum()),
            "maps": maps,
            "settings": output.settings,
            "queued_seconds": round(event.image.queued_seconds, 3),
            **pictures.statistics(output),
        }


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 3)
