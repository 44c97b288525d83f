"""The application that clients speak to where there are several replicas: keys and limits, and each request to one replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from foredraft.llm import LLM
from foredraft.server.app import create_app, guards
from foredraft.server.errors import ApiError, add_error_handlers, error_event, internal_error
from foredraft.server.logging import NOTE, log
from foredraft.server.presence import until_gone
from foredraft.server.replicas.cluster import ReplicaLost, Replicas
from foredraft.server.replicas.metrics import FrontMetrics
from foredraft.server.replicas.request import Forwarded
from foredraft.server.settings import ServerSettings

ATTEMPTS = 2
"""Replicas that a request may be given to, as long as nothing of its answer was sent. Without an end, a request that ends every
replica it is given to would end them all."""


def create_front(settings: ServerSettings, replicas: Replicas) -> FastAPI:
    """`app.state.service` is the Front."""
    same = create_app(settings, _no_engine)
    front = Front(settings, replicas, list(same.openapi()["paths"]))

    async def document(_: Request) -> Response:
        return JSONResponse(same.openapi())

    app = FastAPI(
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        routes=[
            Route("/health", front.health),
            Route("/ready", front.ready),
            Route("/metrics", front.all_metrics),
            Route("/openapi.json", document),
            Route("/{path:path}", front),
        ],
        middleware=guards(settings, front.metrics.http),
    )
    app.state.service = front
    add_error_handlers(app)
    return app


class Front:
    """Hands requests to replicas. paths: of one replica, as its document has them: by them requests are counted."""

    def __init__(self, settings: ServerSettings, replicas: Replicas, paths: Sequence[str]) -> None:
        self.settings = settings
        self.metrics = FrontMetrics()
        self._replicas = replicas
        self._routes = [Route(path.replace("}", ":path}"), _no_engine) for path in paths]
        self._relaying: dict[asyncio.Task[None], Forwarded] = {}
        self._is_draining = False
        self._is_stopped = False

    def drain(self) -> None:
        """Take no new requests; those that are here are finished. Who only watches is let go: that has no end of its own."""
        self._is_draining = True
        for work, request in self._relaying.items():
            if request.method == "GET":
                work.cancel()

    async def stop(self) -> None:
        """End what is being written, with an error that says so."""
        self._is_draining = self._is_stopped = True
        for work in self._relaying:
            work.cancel()

    async def health(self, _: Request) -> Response:
        """Replicas come and go, and come back without anybody's help: that none is there is no reason to start again."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """One replica is enough."""
        if self._is_draining or not await self._replicas.reports():
            raise self._unavailable()
        return JSONResponse({"status": "ready"})

    async def all_metrics(self, _: Request) -> Response:
        text = self.metrics.text(await self._replicas.reports())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Anything else. A client that goes away ends its request."""
        scope["route"] = self._route_of(scope)
        if self._is_draining:
            raise self._unavailable()
        request = Forwarded.of(scope, await _body(receive))
        exchange = _Exchange(scope[NOTE], send)
        work = asyncio.create_task(self._relay(request, exchange))
        gone = asyncio.create_task(until_gone(receive))
        self._relaying[work] = request
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._relaying[work]
            is_done = work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
        if is_done:
            work.result()
        else:
            scope[NOTE]["ended"] = "the client went away"

    async def _relay(self, request: Forwarded, exchange: _Exchange) -> None:
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

    async def _try_replicas(self, request: Forwarded, exchange: _Exchange) -> None:
        """One, and another one if that ends before anything was sent. The time to the beginning is limited here, the rest by
        the replica."""
        limit = self.settings.limits.request_seconds
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        for is_last in (False,) * (ATTEMPTS - 1) + (True,):
            try:
                async with asyncio.timeout_at(deadline) as clock, aclosing(self._replicas.answer(request)) as answer:
                    async for messages in answer:
                        await exchange.pass_on(messages)
                        if exchange.has_begun:
                            clock.reschedule(None)
                return
            except TimeoutError:
                raise ApiError(408, f"the request took more than {limit:g} seconds", code="timeout") from None
            except ReplicaLost:
                self._note_loss("broken" if exchange.has_begun else "failed" if is_last else "retried")
                if exchange.has_begun or is_last:
                    raise _lost() from None

    def _note_loss(self, outcome: str) -> None:
        self.metrics.lost.labels(outcome).inc()
        log("replica_lost", logging.WARNING, request=outcome)

    def _route_of(self, scope: Scope) -> Any:
        """So that the log and the metrics name it as one server does."""
        return next((route for route in self._routes if route.matches(scope)[0] is not Match.NONE), None)

    def _unavailable(self) -> ApiError:
        what = "is shutting down" if self._is_draining else "has no replica that is ready"
        return ApiError(503, f"the server {what}", code="unavailable", headers={"Retry-After": "5"})


class _Exchange:
    """The answer to one client, as far as it was sent."""

    def __init__(self, note: dict[str, Any], send: Send) -> None:
        self._note = note
        self._send = send
        self._start: Message | None = None
        self._is_stream = False
        self.has_begun = False

    async def pass_on(self, messages: Sequence[Message]) -> None:
        """Nothing is sent before the first part of a body: until then another replica can still write it."""
        for message in messages:
            if message["type"] == "http.response.start":
                self._start = _without_id(message)
            elif message["type"] == "http.response.body":
                await self._begin()
                await self._send(message)
            elif message["type"] == NOTE:
                self._note.update(message["note"])

    async def fail(self, error: Exception) -> None:
        """As the answer, where none has begun, by raising it; else as the last event of a stream. Any other answer is cut
        off, which its length or its chunks tell the client."""
        found = error if isinstance(error, ApiError) else internal_error()
        self._note["error"] = found.code or found.status_code
        if not (self.has_begun and self._is_stream):
            raise error
        await self._send({"type": "http.response.body", "body": error_event(found), "more_body": False})

    async def end(self) -> None:
        """Without a word."""
        await self._begin()
        if self.has_begun:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in start["headers"])
            self.has_begun = True
            await self._send(start)


def _without_id(start: Message) -> Message:
    """The request has one already."""
    return {**start, "headers": [(name, value) for name, value in start["headers"] if name != b"x-request-id"]}


def _lost() -> ApiError:
    return ApiError(
        503,
        "the replica that wrote this has ended: what was sent is not complete; send the request again",
        code="replica_lost",
        headers={"Retry-After": "1"},
    )


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _no_engine() -> LLM:
    raise AssertionError("there is no engine in front")
