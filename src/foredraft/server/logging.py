"""One line of JSON for each request. Prompts, texts and keys are in none, unless prompts are asked for."""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import MutableMapping
from types import TracebackType
from typing import IO, Any
from uuid import uuid4

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import internal_error

logger = logging.getLogger("foredraft.server")

NOTE = "foredraft.note"
"""Where a request's scope keeps what is to be said of it."""

REQUEST_ID = "foredraft.request_id"
"""Where it keeps its id: the client's X-Request-Id, or one of ours."""
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Watch:
    """Around everything else: what was asked, what was answered and how long it took, to the log and the metrics; and an
    answer where something went wrong that nobody foresaw."""

    def __init__(self, app: ASGIApp, *, http: Counter) -> None:
        self._app = app
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note: dict[str, Any] = {}
        scope[NOTE] = note
        request_id, started, status = _id_of(scope), time.perf_counter(), 0
        scope[REQUEST_ID] = request_id

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except Exception as error:
            log(
                "failed",
                logging.ERROR,
                request_id=request_id,
                error=type(error).__name__,
                at=places(error.__traceback__),
            )
            if status == 0:
                await internal_error().response()(scope, receive, send_marked)
        finally:
            route = _route_of(scope)
            self._http.labels(route, str(status)).inc()
            seconds = round(time.perf_counter() - started, 6)
            level = logging.INFO if route not in _QUIET else logging.DEBUG
            log(
                "request",
                level,
                request_id=request_id,
                method=scope["method"],
                route=route,
                status=status,
                seconds=seconds,
                **note,
            )


def _id_of(scope: Scope) -> str:
    """The client's, unless it is too long for a log or has characters that do not belong there."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _GOOD_ID.fullmatch(given) else uuid4().hex


_QUIET = {"/health", "/ready", "/metrics", "/live/{name}"}


def _route_of(scope: MutableMapping[str, Any]) -> str:
    """The route's own form: a path may be anything, and would make a series of its own."""
    return getattr(scope.get("route"), "path", None) or "unknown"


def places(trace: TracebackType | None) -> list[str]:
    """Where it happened; not what was said, which may quote a prompt."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)[-8:]]


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})


class JsonLines(logging.Handler):
    """Writes records as lines of JSON. Other libraries' records come without their tracebacks' messages."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": " ".join(record.getMessage().split()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["at"] = places(record.exc_info[2])
        try:
            self._stream.write(json.dumps(line, default=str) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads the log any more: that is no reason to fail
            pass
