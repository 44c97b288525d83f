"""The application that clients connect to if there are several replicas: it checks keys and limits and forwards each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from foredraft.llm import LLM
from foredraft.server.api_errors import ApiError, add_error_handlers, internal_error
from foredraft.server.app import create_app, make_middleware
from foredraft.server.disconnect import wait_for_disconnect
from foredraft.server.replicas.cluster import ReplicaLost, Replicas
from foredraft.server.replicas.forwarded_request import ForwardedRequest
from foredraft.server.replicas.merged_metrics import FrontMetrics
from foredraft.server.replicas.sent_events import SentEvents
from foredraft.server.request_log import LOG_FIELDS, log_event
from foredraft.server.server_settings import ServerSettings

ATTEMPTS = 2
"""The number of replicas that a request may be sent to before any part of its response has been sent. Bounded, so that a request
that crashes its replica does not crash them all."""
_DISCONNECTED = "the client disconnected"


def create_front(settings: ServerSettings, replicas: Replicas) -> FastAPI:
    """`app.state.service` is the Front."""
    replica_app = create_app(settings, _no_engine)
    front = Front(settings, replicas, list(replica_app.openapi()["paths"]))

    async def document(_: Request) -> Response:
        return JSONResponse(replica_app.openapi())

    app = FastAPI(
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        routes=[
            APIRoute("/health", front.health, methods=["GET", "HEAD"]),
            APIRoute("/ready", front.ready, methods=["GET", "HEAD"]),
            APIRoute("/metrics", front.all_metrics, methods=["GET", "HEAD"]),
            Route("/openapi.json", document),
            Route("/{path:path}", front),
        ],
        middleware=make_middleware(settings, front.metrics.http),
    )
    app.state.service = front
    add_error_handlers(app)
    return app


class Front:
    """Forwards requests to replicas. paths: the paths in a replica's OpenAPI document, by which requests are counted."""

    def __init__(self, settings: ServerSettings, replicas: Replicas, paths: Sequence[str]) -> None:
        self.settings = settings
        self.metrics = FrontMetrics()
        self._replicas = replicas
        self._routes = [Route(path.replace("}", ":path}"), _no_engine) for path in paths]
        self._relaying: dict[asyncio.Task[None], ForwardedRequest] = {}
        self._is_draining = False
        self._is_stopped = False

    def drain(self) -> None:
        """Accept no new requests, and let running ones finish. The streams of the live page, which would never end, are closed."""
        self._is_draining = True
        for work, request in self._relaying.items():
            if request.method == "GET":
                work.cancel()

    async def stop(self) -> None:
        """Abort the running requests, with an error that says so."""
        self._is_draining = self._is_stopped = True
        for work in self._relaying:
            work.cancel()

    async def health(self, _: Request) -> Response:
        """Always ok: replicas are restarted by Serve, so their absence is no reason to restart the front."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Whether at least one replica answers."""
        if self._is_draining or not await self._replicas.reports():
            raise self._unavailable()
        return JSONResponse({"status": "ready"})

    async def all_metrics(self, _: Request) -> Response:
        text = self.metrics.text(await self._replicas.reports())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards any other request. It is aborted if the client disconnects."""
        scope["route"] = self._route_of(scope)
        if self._is_draining:
            raise self._unavailable()
        body = await _body(receive)
        if body is None:
            scope[LOG_FIELDS]["ended"] = _DISCONNECTED
            return
        request = ForwardedRequest.of(scope, body)
        exchange = _ProxiedResponse(scope[LOG_FIELDS], send)
        work = asyncio.create_task(self._relay(request, exchange))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        self._relaying[work] = request
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if exchange.is_complete:  # which counts as a disconnection, but the fields to log are still to come
                await asyncio.wait((work,))
        finally:
            del self._relaying[work]
            is_done = work.done()
            for task in (work, disconnect):
                task.cancel()
            await asyncio.wait((work, disconnect))
        if is_done:
            work.result()
        else:
            scope[LOG_FIELDS]["ended"] = _DISCONNECTED

    async def _relay(self, request: ForwardedRequest, exchange: _ProxiedResponse) -> None:
        try:
            await self._try_replicas(request, exchange)
        except asyncio.CancelledError:
            if self._is_stopped:
                await exchange.fail(self._unavailable())
            elif self._is_draining and request.method == "GET":
                await exchange.end()
            else:
                raise
        except Exception as error:
            await exchange.fail(error)

    async def _try_replicas(self, request: ForwardedRequest, exchange: _ProxiedResponse) -> None:
        """Forward the request, and once more if its replica ends before anything was sent. The time until the response starts is
        limited here; after that the replica limits it."""
        limit = self.settings.limits.request_seconds
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        for is_last in (False,) * (ATTEMPTS - 1) + (True,):
            try:
                async with asyncio.timeout_at(deadline) as clock, aclosing(self._replicas.answer(request)) as answer:
                    async for messages in answer:
                        await exchange.forward(messages)
                        if exchange.has_started:
                            clock.reschedule(None)
                return
            except TimeoutError:
                raise ApiError(408, f"the request took more than {limit:g} seconds", code="timeout") from None
            except ReplicaLost:
                if exchange.is_complete:
                    return
                self._note_loss("broken" if exchange.has_started else "failed" if is_last else "retried")
                if exchange.has_started or is_last:
                    raise _lost() from None

    def _note_loss(self, outcome: str) -> None:
        self.metrics.lost.labels(outcome).inc()
        log_event("replica_lost", logging.WARNING, request=outcome)

    def _route_of(self, scope: Scope) -> Any:
        """The route that the log and the metrics name, as a single server would."""
        return next((route for route in self._routes if route.matches(scope)[0] is not Match.NONE), None)

    def _unavailable(self) -> ApiError:
        state = "is shutting down" if self._is_draining else "has no replica that is ready"
        return ApiError(503, f"the server {state}", code="unavailable", headers={"Retry-After": "5"})


class _ProxiedResponse:
    """A response that is passed on to the client. is_complete: whether its last part has been sent."""

    def __init__(self, log_fields: dict[str, Any], send: Send) -> None:
        self._log_fields = log_fields
        self._send = send
        self._start: Message | None = None
        self._is_stream = False
        self._sent_events = SentEvents()
        self.has_started = False
        self.is_complete = False

    async def forward(self, messages: Sequence[Message]) -> None:
        """Pass on ASGI messages. Nothing is sent before the first part of the body, so until then another replica can be tried."""
        for message in messages:
            if message["type"] == "http.response.start":
                self._start = _without_id(message)
            elif message["type"] == "http.response.body":
                await self._start_response()
                await self._send_body(message)
            elif message["type"] == LOG_FIELDS:
                self._log_fields.update(message["fields"])

    async def fail(self, error: Exception) -> None:
        """Raise the error if the response has not started; otherwise end a stream with it. A response that is not a stream is cut
        off, which the client notices by its length or its missing last chunk. Nothing follows a complete response."""
        if self.is_complete:
            return
        api_error = error if isinstance(error, ApiError) else internal_error()
        self._log_fields["error"] = api_error.code or api_error.status_code
        if not (self.has_started and self._is_stream):
            raise error
        events = self._sent_events.failure(api_error)
        await self._send_body({"type": "http.response.body", "body": events, "more_body": False})

    async def end(self) -> None:
        """End the response without an error."""
        await self._start_response()
        if self.has_started and not self.is_complete:
            await self._send_body({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, message: Message) -> None:
        self.is_complete = not message.get("more_body", False)
        if self._is_stream:
            self._sent_events.add(message.get("body", b""))
        await self._send(message)

    async def _start_response(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in start["headers"])
            self.has_started = True
            await self._send(start)


def _without_id(start: Message) -> Message:
    """The response's start without the replica's request id, since the front adds its own."""
    return {**start, "headers": [(name, value) for name, value in start["headers"] if name != b"x-request-id"]}


def _lost() -> ApiError:
    return ApiError(
        503,
        "the replica that handled this request ended before the response was complete: send the request again",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )


async def _body(receive: Receive) -> bytes | None:
    """None if the client disconnects before the body is complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _no_engine() -> LLM:
    raise AssertionError("the front has no engine")
