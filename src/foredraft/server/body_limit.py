"""Limits the size of request bodies and the time in which they must arrive. Nothing is buffered here."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.api_errors import ApiError


class BodyLimitMiddleware:
    """Answers 413 to a body of more than max_bytes as soon as that is known, 408 to one that is not complete after this many
    seconds, and 415 to one that is compressed."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._header_error(Headers(scope=scope))
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _header_error(self, headers: Headers) -> ApiError | None:
        """The error of a body that its headers already show to be unacceptable."""
        length = headers.get("content-length", "")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity") and (length not in ("", "0") or "transfer-encoding" in headers):
            return _compressed(coding)
        return self._too_large() if length.isdecimal() and int(length) > self._max_bytes else None

    def _limited(self, receive: Receive) -> Receive:
        """receive, with ApiErrors for a body that is too large or too slow."""
        num_bytes, is_complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # only the client's disconnection can follow
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {self._seconds:g} seconds") from None
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> ApiError:
        """It ends the connection, since the rest of the body may be too much to discard."""
        message = f"the body is larger than {self._max_bytes} bytes"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _compressed(coding: str) -> ApiError:
    message = f"the body is compressed (Content-Encoding: {coding[:40]}): send it uncompressed"
    headers = {"Accept-Encoding": "identity"}
    return ApiError(415, message, code="unsupported_content_encoding", headers=headers)
