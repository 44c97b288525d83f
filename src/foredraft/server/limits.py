"""How much may be sent, and how slowly. Nothing is buffered here."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import ApiError


class BodyLimit:
    """Answers 413 to a body that is too large, as soon as that is known, 408 to one that does not come, and 415 to one that
    is compressed."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity") and (declared not in ("", "0") or "transfer-encoding" in headers):
            await _compressed(coding).response()(scope, receive, send)
            return
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes, is_complete = 0, False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def receive_some() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # what follows is the client going away
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body was not there within {self._seconds:g} seconds") from None
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_some, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_bytes} bytes", code="body_too_large")


def _compressed(coding: str) -> ApiError:
    message = f"the body is compressed (Content-Encoding: {coding[:40]}): send it as it is"
    headers = {"Accept-Encoding": "identity"}
    return ApiError(415, message, code="unsupported_content_encoding", headers=headers)
