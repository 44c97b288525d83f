"""The log: one line of JSON for each request. It has no keys, and prompts and texts only if the server is set to log them."""

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

from foredraft.server.api_errors import internal_error

logger = logging.getLogger("foredraft.server")

LOG_FIELDS = "foredraft.note"
"""The key under which a request's scope has the fields to log with it."""

REQUEST_ID = "foredraft.request_id"
"""The key under which a request's scope has its id: the client's X-Request-Id, or a random one."""
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

_CLIENT_CLOSED_REQUEST = 499
"""The status to log and count if the client disconnected before the response began, as in nginx."""


class RequestLogMiddleware:
    """Logs and counts every request: its route, the status of the response and the time. An exception that nothing else handled is
    logged and answered with 500."""

    def __init__(self, app: ASGIApp, *, http: Counter) -> None:
        """http: counts responses, by route and status."""
        self._app = app
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _RequestRecord(scope, send)
        try:
            await self._app(scope, receive, record.send)
        except Exception as error:
            record.log_failure(error)
            if record.status is None:
                await internal_error().response()(scope, receive, record.send)
        finally:
            status = _CLIENT_CLOSED_REQUEST if record.status is None else record.status
            self._http.labels(_route_of(scope), str(status)).inc()
            record.log_request(status)


class _RequestRecord:
    """What is logged about one request. status: of the response; None until it begins."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._request_id = scope[REQUEST_ID] = _id_of(scope)
        self._fields: dict[str, Any] = {}
        scope[LOG_FIELDS] = self._fields
        self._started_at = time.perf_counter()
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Sends a message of the response, with the request's id in its headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], (b"x-request-id", self._request_id.encode())]}
        await self._send(message)

    def log_failure(self, error: Exception) -> None:
        log_event(
            "failed",
            logging.ERROR,
            request_id=self._request_id,
            error=type(error).__name__,
            at=traceback_locations(error.__traceback__),
        )

    def log_request(self, status: int) -> None:
        route = _route_of(self._scope)
        log_event(
            "request",
            logging.DEBUG if route in _QUIET_ROUTES else logging.INFO,
            request_id=self._request_id,
            method=self._scope["method"],
            route=route,
            status=status,
            seconds=round(time.perf_counter() - self._started_at, 6),
            **self._fields,
        )


def _id_of(scope: Scope) -> str:
    """The client's id; a random one if it is too long or has characters that do not belong in a log."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _VALID_ID.fullmatch(given) else uuid4().hex


_QUIET_ROUTES = {"/health", "/ready", "/metrics", "/live/{name}"}


def _route_of(scope: MutableMapping[str, Any]) -> str:
    """The route's pattern rather than the path, since every path would create a metric series of its own."""
    return getattr(scope.get("route"), "path", None) or "unknown"


def traceback_locations(trace: TracebackType | None) -> list[str]:
    """The last frames of a traceback, without the message, which may quote a prompt."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)[-8:]]


def log_event(event: str, level: int = logging.INFO, **fields: Any) -> None:
    logger.log(level, event, extra={"fields": fields})


class JsonLinesHandler(logging.Handler):
    """Writes records as lines of JSON. For an exception it writes the type and the location, not the message."""

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
            line["at"] = traceback_locations(record.exc_info[2])
        try:
            self._stream.write(json.dumps(line, default=str) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads the log any more; that must not end a request
            pass
