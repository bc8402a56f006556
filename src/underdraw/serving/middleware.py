"""What happens around every request: its id, the API key, limits of its body, a log line and metrics."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from underdraw.serving.errors import ApiError
from underdraw.serving.metrics import Metrics
from underdraw.serving.settings import ServerSettings

log = logging.getLogger(__name__)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
GUARDED = ("/v1/", "/draw", "/metrics")  # routes that need the API key; the page and /health do not
ROUTES = frozenset({"/", "/info", "/draw", "/metrics", "/health", "/health/live", "/health/ready", "/v1/models"})
ROUTES |= {"/v1/images/generations"}  # named in logs and metrics also where a request is refused before it is routed
PROBES = ("/health", "/metrics")  # asked for every few seconds; logged only where they fail
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'",
}


class RequestMiddleware:
    """Plain ASGI, so that a handler sees at once that its client has gone."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started, status = Headers(scope=scope), time.perf_counter(), 499  # 499: the client went away
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{uuid.uuid4().hex[:20]}"
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_started
            if message["type"] == "http.response.start":
                status, has_started = message["status"], True
                answer = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in {"X-Request-Id": request_id, **SECURITY_HEADERS}.items():
                    answer.setdefault(name, value)
            await send(message)

        try:
            self._check(scope["path"], headers)
            await self.app(scope, self._limited(receive), send_with_id)
        except ApiError as error:
            if not has_started:
                await error.response()(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if not has_started:
                answer = ApiError(500, "the server failed; its log has the reason.", code="internal_error")
                await answer.response()(scope, receive, send_with_id)
        finally:
            self._record(scope, request_id, status, time.perf_counter() - started)

    def _check(self, path: str, headers: Headers) -> None:
        """Refuse a request to another host, without the API key, or with a body that says it is too long."""
        if not self.settings.accepts_host(headers.get("host", "")):
            message = "this server does not answer to that host name; start it with --allowed-host NAME to allow it."
            raise ApiError(403, message, code="host_not_allowed")
        key = self.settings.api_key
        if key is not None and path.startswith(GUARDED):
            kind, _, token = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), key.encode()):
                raise ApiError(401, "send the server's API key as a bearer token.", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 12 or int(length) > self.settings.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.settings.max_body:,} bytes.", code="body_too_large")

    def _limited(self, receive: Receive) -> Receive:
        """`receive` with the limits of the body: its bytes, and the time that it may take to arrive."""
        size, is_complete = 0, False
        deadline = anyio.current_time() + self.settings.body_timeout

        async def limited() -> Message:
            nonlocal size, is_complete
            if is_complete:
                return await receive()  # waits until the client has gone
            message: dict[str, Any] | None = None
            with anyio.move_on_after(max(0.0, deadline - anyio.current_time())):
                message = dict(await receive())
            if message is None:
                raise ApiError(408, "the body took too long to arrive.", code="body_timeout")
            size += len(message.get("body", b""))
            if size > self.settings.max_body:
                raise self._too_large()
            is_complete = not message.get("more_body", False)
            return message

        return limited

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        # Not any path: clients could invent millions.
        unrouted: str = scope["path"] if scope["path"] in ROUTES else "other"
        route = getattr(scope.get("route"), "path", unrouted)
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.request_seconds.labels(route).observe(seconds)
        details = scope["state"].get("log", "")
        level = logging.DEBUG if route.startswith(PROBES) and status < 400 else logging.INFO
        log.log(level, "%s %s %s %d %.3f s%s", request_id, scope["method"], route, status, seconds, details)
