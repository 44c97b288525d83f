"""The routes of the live page: the page, its files, and the stream of frames."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress

from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foredraft import __version__
from foredraft.server.disconnect import wait_for_disconnect
from foredraft.server.live.broadcaster import Broadcaster, WatcherState
from foredraft.server.live.observer import LiveObserver
from foredraft.trace.assets import asset, page_template
from foredraft.trace.three_js import three_js

_PAGE = ("foredraft.server.live", "page")
_VIEWER_SCRIPTS = ("data.js", "token.js", "replay.js", "rounds.js", "player.js")
_PAGE_SCRIPTS = ("series.js", "chart.js", "stream.js", "writing.js", "trial.js", "live.js")
_STYLES = ("style.css", "live.css")
SCRIPTS = ("three.js", *_VIEWER_SCRIPTS, *_PAGE_SCRIPTS)  # in the order of their dependencies
PUBLIC_PATHS = frozenset({"/", *(f"/live/{name}" for name in (*SCRIPTS, *_STYLES))})
"""Paths that need no key: the page and its files, which are the same for everyone and contain no data."""

_POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind} 'self'" for kind in ("script-src", "style-src", "connect-src")),
        "img-src data:",
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    ]
)
_SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_PAGE_HEADERS = {**_SECURITY_HEADERS, "Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
_FILE_HEADERS = {**_SECURITY_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
_STREAM_HEADERS = {**_SECURITY_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}

FRAME_SECONDS = 0.15
HEARTBEAT_SECONDS = 5.0
STUCK_SECONDS = 30.0
"""A watcher that reads nothing for this long is disconnected."""


def live_routes(observer: LiveObserver) -> APIRouter:
    """GET /, its files under /live/, and /live/events, the only route with data. If the server needs a key, the page asks its user
    for it and sends it to /live/events as a bearer token."""
    router = APIRouter(include_in_schema=False)
    broadcaster = Broadcaster(observer)
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
        return _EventStream(broadcaster, observer)

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
    return asset(name, *_PAGE) if name in (*_PAGE_SCRIPTS, "live.css") else asset(name)


def _unavailable(observer: LiveObserver) -> Response:
    message = f"{observer.max_watchers} pages are already watching, which is the limit: close one of them"
    if not observer.is_open:
        message = (
            "there is nothing to watch: the server is starting or shutting down, or the live page failed (see the log)"
        )
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": "live_page_unavailable"}}
    return JSONResponse(body, status_code=503, headers={**_STREAM_HEADERS, "Retry-After": "5"})


class _EventStream(Response):
    """Sends frames as server-sent events to one watcher, until it disconnects or the observer is closed."""

    media_type = "text/event-stream"

    def __init__(self, broadcaster: Broadcaster, observer: LiveObserver) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._broadcaster, self._observer = broadcaster, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._broadcaster.join()
        if state is None:
            await _unavailable(self._observer)(scope, receive, send)
            return
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(TimeoutError):
                await self._send_frames(state, send, gone)
        finally:
            gone.cancel()
            self._broadcaster.leave()

    async def _send_frames(self, state: WatcherState, send: Send, gone: asyncio.Future[None]) -> None:
        """Raises TimeoutError if the watcher stops reading."""
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        while not (gone.done() or self._observer.is_closed):
            frame = self._broadcaster.frame(state)
            text = None if frame is None else f"data: {json.dumps(frame, separators=(',', ':'))}\n\n"
            if text is None and clock() - sent_at >= HEARTBEAT_SECONDS:
                text = ": still here\n\n"
            if text is not None:
                sent_at = clock()
                body = {"type": "http.response.body", "body": text.encode(), "more_body": True}
                await asyncio.wait_for(send(body), STUCK_SECONDS)
            await asyncio.wait([gone], timeout=FRAME_SECONDS)
        if not gone.done():
            await asyncio.wait_for(send({"type": "http.response.body", "body": b"", "more_body": False}), STUCK_SECONDS)
