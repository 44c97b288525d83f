"""OpenAI's form of an error."""

from __future__ import annotations

from typing import Literal

from foredraft.server.wire.base import Answer

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "timeout_error",
    "server_error",
]


class ErrorDetail(Answer):
    """param: the field it is about. code: what a program may go by."""

    message: str
    type: ErrorType
    param: str | None = None
    code: str | None = None


class ErrorBody(Answer):
    error: ErrorDetail
