"""Every error in OpenAI's form, whoever raised it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from foredraft.server.wire.base import REFUSED
from foredraft.server.wire.errors import ErrorBody, ErrorDetail, ErrorType

_TYPES: Mapping[int, ErrorType] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


MOST_SAID = 800


def one_line(text: str, most: int = MOST_SAID) -> str:
    """What can be printed as it is, and anything else by its number."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


class ApiError(HTTPException):
    """An answer that is an error. message: may quote what was sent; it becomes one line of at most MOST_SAID characters.
    param: the field it is about. code: what a program may go by."""

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
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return ErrorDetail(message=self.detail, type=kind, param=self.param, code=self.code)

    @property
    def body(self) -> bytes:
        return ErrorBody(error=self.error).model_dump_json().encode()

    def response(self) -> Response:
        return Response(self.body, self.status_code, self.headers, "application/json")


def internal_error() -> ApiError:
    """What is wrong is for the log, not for the client."""
    return ApiError(500, "the server failed on this request; its log says more", code="internal_error")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    message = error.detail
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]}"
    elif error.status_code == 405:
        message = f"{request.method[:20]} is not for {request.url.path[:200]}"
    elif error.status_code == 400:
        message = "the body could not be read"
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _on_invalid(_: Request, error: Exception) -> Response:
    """FastAPI's 422 is OpenAI's 400."""
    assert isinstance(error, RequestValidationError)
    # of a union every member complains; the one that got furthest is what was meant
    found = [(one, _place(one, error.body)) for one in error.errors()]
    first, parts = max(found, key=lambda pair: len(pair[1]))
    param = "".join(parts).removeprefix(".") or None
    return ApiError(400, _message(first, param), param=param).response()


def _place(error: Mapping[str, Any], body: Any) -> list[str]:
    """Where in the body it is: .messages, [0], .content. What pydantic adds to a place, such as the kind that it tried, is
    left out."""
    loc: Sequence[int | str] = error["loc"][1:]
    found, value = [], body
    for part in loc:
        if isinstance(part, str) and isinstance(value, dict) and part in value:
            found.append(f".{part}")
            value = value[part]
        elif isinstance(part, int) and isinstance(value, list) and part < len(value):
            found.append(f"[{part}]")
            value = value[part]
    if error["type"] == "missing" and loc:
        found.append(f".{loc[-1]}")
    if error["type"] == REFUSED:
        found.append(f".{error['ctx']['name']}")
    return found


def _message(error: Mapping[str, Any], param: str | None) -> str:
    kind, text = error["type"], str(error["msg"]).removeprefix("Value error, ")
    if param is None and kind in ("missing", "model_attributes_type", "model_type", "dict_type"):
        return "the body must be a JSON object, sent with Content-Type: application/json"
    if param is None:
        return text
    return f"{param}: {text[:1].lower()}{text[1:]}"


def error_event(error: ApiError) -> bytes:
    """The error of a stream that has begun."""
    return b"data: " + error.body + b"\n\n"
