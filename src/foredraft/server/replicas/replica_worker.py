"""Runs in a replica: the application of a single server, called without a socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.server.app import create_app
from foredraft.server.replicas.forwarded_request import ForwardedRequest
from foredraft.server.request_log import LOG_FIELDS
from foredraft.server.server_settings import ServerSettings

_STOP_SECONDS = 5.0
"""Seconds that the application has to end a request after its client disconnected."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """replica: its name. text: its metrics in Prometheus' text format."""

    replica: str
    host: str
    pid: int
    text: bytes


class Worker:
    """One engine. settings: without keys and host names, which the front checks."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, so the models are loaded before the first request
        self, name: Callable[[], str], settings: ServerSettings, make_llm: Callable[[], LLM]
    ) -> None:
        self._name = name()
        self._app = create_app(settings, make_llm)
        self._running = AsyncExitStack()
        await self._running.enter_async_context(self._app.router.lifespan_context(self._app))

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[list[dict[str, Any]]]:
        """The application's ASGI messages, in batches of those that are ready; the last message has the fields to log. A caller that
        stops reading counts as a client that disconnected."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope, disconnected = request.scope(), asyncio.Event()
        unread = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)  # type: ignore[arg-type]
            finally:
                messages.put_nowait({"type": LOG_FIELDS, "fields": scope.get(LOG_FIELDS, {})})

        work = asyncio.create_task(run())
        try:
            is_last = False
            while not is_last:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                is_last = batch[-1]["type"] == LOG_FIELDS
                yield batch
        finally:
            disconnected.set()
            await asyncio.wait({work}, timeout=_STOP_SECONDS)
            work.cancel()

    async def report(self) -> ReplicaReport:
        return ReplicaReport(self._name, socket.gethostname(), os.getpid(), self._app.state.service.metrics.text())

    async def check_health(self) -> None:
        """Raises ForedraftError if the engine has ended, so that Serve starts another replica."""
        if not self._app.state.service.is_alive:
            raise ForedraftError("the engine has stopped")
