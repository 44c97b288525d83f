"""The live page, its files, and the stream of what it shows. Thin: what is shown is the board's business."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foredraft import __version__
from foredraft.server.live.board import Board, Seen
from foredraft.server.live.feed import LiveFeed
from foredraft.trace.assets import asset, page_template
from foredraft.trace.library import three_js

_PAGE = ("foredraft.server.live", "page")
_SHARED = ("data.js", "token.js", "replay.js", "rounds.js", "player.js")
_OWN = ("series.js", "chart.js", "stream.js", "writing.js", "trial.js", "live.js")
_STYLES = ("style.css", "live.css")
SCRIPTS = ("three.js", *_SHARED, *_OWN)  # in the order they build on
PUBLIC_PATHS = frozenset({"/", *(f"/live/{name}" for name in (*SCRIPTS, *_STYLES))})
"""What is the same for everyone and tells nothing: the page, and what it is made of."""

_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind} 'self'" for kind in ("script-src", "style-src", "connect-src")),
        "img-src data:",
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
_SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_PAGE_HEADERS = {**_SAFE, "Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
_FILE_HEADERS = {**_SAFE, "Cache-Control": "public, max-age=31536000, immutable"}
_STREAM_HEADERS = {**_SAFE, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}

FRAME_SECONDS = 0.15
HEARTBEAT_SECONDS = 5.0
STUCK_SECONDS = 30.0
"""A watcher that takes nothing for so long is given up."""


def live_routes(feed: LiveFeed) -> APIRouter:
    """GET /, its files below /live/, and /live/events, which alone tells anything: where a key is needed, the page asks its
    user for it and sends it there as a bearer token."""
    router = APIRouter(include_in_schema=False)
    board = Board(feed)
    files = {name: _content(name) for name in (*SCRIPTS, *_STYLES)}
    version = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:12]
    page = page_template(*_PAGE).render(
        version=__version__,
        scripts=[f"live/{name}?{version}" for name in SCRIPTS],
        styles=[f"live/{name}?{version}" for name in _STYLES],
    )

    @router.get("/")
    async def show_page() -> Response:
        return Response(page, media_type="text/html", headers=_PAGE_HEADERS)

    @router.get("/live/events", response_model=None)
    async def events() -> Response:
        return _Stream(board, feed)

    @router.get("/live/{name}")
    async def show_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(files[name], media_type=kind, headers=_FILE_HEADERS)

    return router


def _content(name: str) -> str:
    if name == "three.js":
        return three_js()
    return asset(name, *_PAGE) if name in (*_OWN, "live.css") else asset(name)


def _refusal(feed: LiveFeed) -> Response:
    message = f"{feed.max_watchers} watch already, which is the limit: close one of the pages"
    if not feed.is_open:
        message = "there is nothing to watch: the server starts or ends, or the log says why"
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": "live_page_unavailable"}}
    return JSONResponse(body, status_code=503, headers={**_STREAM_HEADERS, "Retry-After": "5"})


class _Stream(Response):
    """Frames as server-sent events, for one watcher, until it goes or the feed is closed."""

    media_type = "text/event-stream"

    def __init__(self, board: Board, feed: LiveFeed) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._board, self._feed = board, feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = self._board.join()
        if seen is None:
            await _refusal(self._feed)(scope, receive, send)
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(TimeoutError):
                await self._tell(seen, send, gone)
        finally:
            gone.cancel()
            self._board.leave()

    async def _tell(self, seen: Seen, send: Send, gone: asyncio.Future[None]) -> None:
        """Raises TimeoutError once the watcher takes nothing any more."""
        clock = asyncio.get_running_loop().time
        told_at = clock()
        while not (gone.done() or self._feed.is_closed):
            frame = self._board.frame(seen)
            text = None if frame is None else f"data: {json.dumps(frame, separators=(',', ':'))}\n\n"
            if text is None and clock() - told_at >= HEARTBEAT_SECONDS:
                text = ": still here\n\n"
            if text is not None:
                told_at = clock()
                body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                await asyncio.wait_for(send(body), STUCK_SECONDS)
            await asyncio.wait([gone], timeout=FRAME_SECONDS)
        if not gone.done():
            await asyncio.wait_for(send({"type": "http.response.body", "body": b"", "more_body": False}), STUCK_SECONDS)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
