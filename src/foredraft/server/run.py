"""A socket for the application, and what happens at signals. The only file that knows uvicorn."""

from __future__ import annotations

import asyncio
import socket
import ssl
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from foredraft.errors import ForedraftError
from foredraft.server.service import Service
from foredraft.server.settings import RequestLimits
from foredraft.server.tls import TlsFiles

_LAST_GRACE = 3.0
"""Seconds from a second signal to the end, for what is still being said."""


def listen(host: str, port: int) -> socket.socket:
    """Raises ForedraftError where nobody can listen. Connections inherit the options: a peer that is gone is noticed."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # localhost is 127.0.0.1 to most
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ForedraftError(f"{host}: no address to listen on: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ForedraftError(f"{host}:{port}: cannot listen there: {error.strerror}: give another --port") from None
    return listener


def serve(
    app: FastAPI, listener: socket.socket, *, drain_seconds: float | None = None, tls: TlsFiles | None = None
) -> None:
    """Until a signal. The first one ends it when all requests are finished, at the latest after drain_seconds; the second
    one ends them."""
    make_server(app, drain_seconds=drain_seconds, tls=tls).run(sockets=[listener])


def make_server(app: FastAPI, *, drain_seconds: float | None = None, tls: TlsFiles | None = None) -> Server:
    """tls: None speaks plain HTTP."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        http=_protocol(service.settings.limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        **_tls_options(tls),
    )
    return Server(config, service, drain_seconds)


def _tls_options(tls: TlsFiles | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": None if tls.ca_certs is None else str(tls.ca_certs),
        "ssl_cert_reqs": ssl.CERT_NONE if tls.ca_certs is None else ssl.CERT_REQUIRED,
    }


class Server(uvicorn.Server):
    """Drains at the first signal and stops at the second."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float | None) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions."""
        self.end()

    def end(self) -> None:
        """From any thread: once to drain, again to stop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop if self.should_exit else self._drain)
        self.should_exit = True

    def _drain(self) -> None:
        self._service.drain()
        if self._loop is not None and self._drain_seconds is not None:
            self._loop.call_later(self._drain_seconds, self._stop)

    def _stop(self) -> None:
        assert self._loop is not None
        self._ending = self._loop.create_task(self._service.stop())
        self._loop.call_later(_LAST_GRACE, setattr, self, "force_exit", True)


def _protocol(limits: RequestLimits) -> type[asyncio.Protocol]:
    """uvicorn's own, with an end to waiting: for a request that does not come, and for a client that does not read."""

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reading: asyncio.TimerHandle | None = None
            self._writing: asyncio.TimerHandle | None = None
            self._expect_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._writing is None:
                self._writing = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

        def _expect_request(self) -> None:
            """A clock runs from a request's first byte, or the connection's beginning, to the end of its headers."""
            is_answering = self.cycle is not None and not self.cycle.response_complete
            if is_answering and self._reading is not None:
                self._reading.cancel()
                self._reading = None
            elif not is_answering and self._reading is None:
                self._reading = self.loop.call_later(limits.header_seconds, self._give_up)

        def _give_up(self) -> None:
            self._reading = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

        def _cancel(self) -> None:
            for timer in (self._reading, self._writing):
                if timer is not None:
                    timer.cancel()

    return Protocol
