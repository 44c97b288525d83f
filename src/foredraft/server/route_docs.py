"""What the OpenAPI document says about a route's responses."""

from __future__ import annotations

from typing import Any

from foredraft.server.wire.error_body import ErrorBody
from foredraft.server.wire.models import ResponseModel

Responses = dict[int | str, dict[str, Any]]

_HTTP_ERRORS = {
    400: "The request is invalid; the message says what is wrong.",
    408: "The request did not arrive, or was not finished, in time.",
    414: "The request line is too long.",
    431: "The header fields are too large.",
    501: "The transfer encoding is not supported.",
    503: "The server is starting or shutting down, or has too many connections.",
    505: "The HTTP version is not supported.",
}
"""Errors that every route can have: the HTTP layer answers them before a request reaches its route."""
KEY_ERRORS = {401: "The API key is missing or wrong."}
MODEL_ERRORS = {404: "There is no such model."}
BODY_ERRORS = {413: "The body is too large.", 415: "The body is compressed."}
GENERATION_ERRORS = {
    **KEY_ERRORS,
    **MODEL_ERRORS,
    **BODY_ERRORS,
    429: "Too many texts are running or waiting.",
    500: "The server failed; see its log for the reason.",
}

_EVENT_STREAM = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        },
        "description": "If stream is true: chunks and then [DONE]; for /v1/responses named events.",
    }
}


def documented(response: type[ResponseModel], errors: dict[int, str]) -> Responses:
    """The response of a route, and its errors in addition to those that every route can have."""
    return {200: {"model": response}, **_errors(errors)}


def documented_stream(response: type[ResponseModel], errors: dict[int, str]) -> Responses:
    """The same for a route that can stream its response."""
    return {200: {"model": response, "content": _EVENT_STREAM}, **_errors(errors)}


def documented_text(errors: dict[int, str]) -> Responses:
    """The same for a route that responds with plain text."""
    return {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(errors)}


def _errors(errors: dict[int, str]) -> Responses:
    statuses = dict(sorted({**_HTTP_ERRORS, **errors}.items()))
    return {status: {"model": ErrorBody, "description": description} for status, description in statuses.items()}
