"""Error responses in OpenAI's form."""

from __future__ import annotations

from typing import Literal

from foredraft.server.wire.models import ResponseModel

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "timeout_error",
    "server_error",
]


class ErrorDetail(ResponseModel):
    """param: the field that the error is about. code: a constant that programs can test."""

    message: str
    type: ErrorType
    param: str | None = None
    code: str | None = None


class ErrorBody(ResponseModel):
    error: ErrorDetail
