"""Answers to requests that fail: OpenAI's error object with the right status, never a path or a traceback."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from underdraw.errors import CapacityError, UnderdrawError

TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # other 4xx are invalid_request_error
MAX_SHOWN = 80  # characters of a refused value that a message repeats


class ApiError(HTTPException):
    """A request that is refused, with the field to blame if there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        headers = {"Retry-After": str(retry_after)} if retry_after else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        super().__init__(status, message, headers)
        self.message, self.param, self.code = _printable(message), param and _printable(param), code

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients read."""
        kind = "server_error" if self.status_code >= 500 else TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def _printable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def busy(retry_after: int) -> ApiError:
    return ApiError(429, "the queue is full; try again later.", code="queue_full", retry_after=retry_after)


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down; try again later.", code="shutting_down", retry_after=10)


def starting() -> ApiError:
    return ApiError(503, "the server is warming up; try again in a moment.", code="warming_up", retry_after=5)


def drawing_failed(error: Exception) -> ApiError:
    """What the client learns of an image that failed; anything but a refused request is only in the server's log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError) or type(error).__name__ == "OutOfMemoryError":
        return ApiError(503, "the image does not fit into memory now.", code="out_of_memory", retry_after=10)
    if isinstance(error, UnderdrawError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, "drawing failed; the server's log has the reason.", code="drawing_failed")


def invalid_body(error: RequestValidationError) -> ApiError:
    """The first problem of a request body, in one sentence with the field's name."""
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"][1:]]
    if problem["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON.", code="invalid_json")
    if not path:
        return ApiError(400, "the body must be a JSON object, sent as application/json.", code="invalid_json")
    name = ".".join(path)[:MAX_SHOWN]
    if problem["type"] == "missing":
        return ApiError(400, f"{name} is missing.", param=name, code="missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not a parameter of this server.", param=name, code="unknown_parameter")
    reason = str(problem["msg"]).removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:].rstrip(".")
    value = problem["input"]
    is_short = isinstance(value, str | int | float) and name not in ("prompt", "negative_prompt")
    text = repr(value[:MAX_SHOWN]) if isinstance(value, str) else str(value)[:MAX_SHOWN]
    shown = f" {text}" if is_short else ""
    return ApiError(400, f"{name}{shown}: {reason}.", param=name, code="invalid_value")


def add_handlers(app: FastAPI) -> None:
    """Answer every kind of failure with `ApiError`'s body."""

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        return invalid_body(error).response()

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error, ApiError):
            return error.response()
        if error.status_code == 400:  # FastAPI could not parse the body: not UTF-8, or nested too deeply
            return ApiError(400, "the body is not valid JSON.", code="invalid_json").response()
        unknown = ("the request was refused.", None)
        message, code = {
            404: ("there is nothing at this address.", "unknown_url"),
            405: ("this address takes another method.", "method_not_allowed"),
        }.get(error.status_code, unknown)
        answer = ApiError(error.status_code, message, code=code)
        answer.headers = error.headers
        return answer.response()

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "the server failed; its log has the reason.", code="internal_error").response()
