"""What runs in a replica: the application of a single server, called without a socket."""

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
from foredraft.server.logging import NOTE
from foredraft.server.replicas.request import Forwarded
from foredraft.server.settings import ServerSettings

_LAST_GRACE = 5.0
"""Seconds for an application to end after its client has gone."""


@dataclass(frozen=True, slots=True)
class Report:
    """replica: its name. text: its metrics, in Prometheus' format."""

    replica: str
    host: str
    pid: int
    text: bytes


class Worker:
    """One engine. settings: without key and host names, which are looked at in front."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, and the models are here before the first request
        self, name: Callable[[], str], settings: ServerSettings, make_llm: Callable[[], LLM]
    ) -> None:
        self._name = name()
        self._app = create_app(settings, make_llm)
        self._running = AsyncExitStack()
        await self._running.enter_async_context(self._app.router.lifespan_context(self._app))

    async def answer(self, request: Forwarded) -> AsyncIterator[list[dict[str, Any]]]:
        """The application's messages, those that are there at a time together; the last is a note for the log. A caller
        that stops reading is a client that went away."""
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope, gone = request.scope(), asyncio.Event()
        rest = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if rest:
                return rest.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, inbox.put)  # type: ignore[arg-type]
            finally:
                inbox.put_nowait({"type": NOTE, "note": scope.get(NOTE, {})})

        work = asyncio.create_task(run())
        try:
            is_last = False
            while not is_last:
                batch = [await inbox.get()]
                while not inbox.empty():
                    batch.append(inbox.get_nowait())
                is_last = batch[-1]["type"] == NOTE
                yield batch
        finally:
            gone.set()
            await asyncio.wait({work}, timeout=_LAST_GRACE)
            work.cancel()

    async def report(self) -> Report:
        return Report(self._name, socket.gethostname(), os.getpid(), self._app.state.service.metrics.text())

    async def check_health(self) -> None:
        """Raises where the engine is gone: Serve then starts another replica."""
        if not self._app.state.service.is_alive:
            raise ForedraftError("the engine is gone")
