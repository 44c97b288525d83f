"""Errors as responses in OpenAI's form, whichever layer raised them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from foredraft.server.wire.error_body import ErrorBody, ErrorDetail, ErrorType
from foredraft.server.wire.unsupported_fields import UNSUPPORTED_FIELD

_TYPES: Mapping[int, ErrorType] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}

MAX_MESSAGE_CHARACTERS = 800


def one_line(text: str, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """The text, truncated, with characters that cannot be printed escaped."""
    truncated = text if len(text) <= max_characters else text[: max_characters - 1] + "…"
    if truncated.isprintable():
        return truncated
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in truncated)


class ApiError(HTTPException):
    """An error response. message: may quote the request; it becomes one line of at most MAX_MESSAGE_CHARACTERS characters.
    param: the field that the error is about. code: a constant that programs can test."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, one_line(message), headers)
        self.param = None if param is None else one_line(param)
        self.code = code

    @property
    def error(self) -> ErrorDetail:
        default: ErrorType = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error_type = _TYPES.get(self.status_code, default)
        return ErrorDetail(message=self.detail, type=error_type, param=self.param, code=self.code)

    @property
    def body(self) -> bytes:
        return ErrorBody(error=self.error).model_dump_json().encode()

    def response(self) -> Response:
        return Response(self.body, self.status_code, self.headers, "application/json")


def internal_error() -> ApiError:
    """A 500 without a reason: the reason is logged, not sent."""
    return ApiError(500, "the server failed to process this request: see its log for the reason", code="internal_error")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="unavailable", headers={"Retry-After": "5"})


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    message = error.detail
    if error.status_code == 404:
        message = f"there is no route {request.url.path[:200]}"
    elif error.status_code == 405:
        message = f"{request.method[:20]} is not allowed for {request.url.path[:200]}"
    elif error.status_code == 400:
        message = "the body could not be read"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _on_invalid(_: Request, error: Exception) -> Response:
    """Answers with 400, as OpenAI does, instead of FastAPI's 422."""
    assert isinstance(error, RequestValidationError)
    # every member of a union reports an error; the one that got furthest into the body is the most useful
    errors = [(detail, _path(detail, error.body)) for detail in error.errors()]
    detail, path = max(errors, key=lambda pair: len(pair[1]))
    param = "".join(path).removeprefix(".") or None
    return ApiError(400, _message(detail, param), param=param).response()


def _path(error: Mapping[str, Any], body: Any) -> list[str]:
    """The path of the error in the body: .messages, [0], .content. Parts that pydantic adds, such as the type it tried, are left
    out."""
    loc: Sequence[int | str] = error["loc"][1:]
    path, value = [], body
    for part in loc:
        if isinstance(part, str) and isinstance(value, dict) and part in value:
            path.append(f".{part}")
            value = value[part]
        elif isinstance(part, int) and isinstance(value, list) and part < len(value):
            path.append(f"[{part}]")
            value = value[part]
    if error["type"] == "missing" and loc:
        path.append(f".{loc[-1]}")
    if error["type"] == UNSUPPORTED_FIELD:
        path.append(f".{error['ctx']['name']}")
    return path


def _message(error: Mapping[str, Any], param: str | None) -> str:
    kind, text = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if param is None and kind in ("missing", "model_attributes_type", "model_type", "dict_type"):
        return "the body must be a JSON object, sent with Content-Type: application/json"
    if param is None:
        return text
    return f"{param}: {text[:1].lower()}{text[1:]}"


def error_event(error: ApiError) -> bytes:
    """The event that reports an error in a stream that has begun."""
    return b"data: " + error.body + b"\n\n"
