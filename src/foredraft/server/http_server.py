"""Runs the application on a socket, with uvicorn, and shuts it down on signals."""

from __future__ import annotations

import asyncio
import socket
import ssl
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from foredraft.errors import ForedraftError
from foredraft.server.http import LimitedProtocol, make_protocol
from foredraft.server.request_log import logger
from foredraft.server.service import Service
from foredraft.server.tls import TlsFiles

_NUM_OTHER_FILES = 256
"""Files that the process has open besides its connections."""
_STOP_SECONDS = 3.0
"""Seconds from the second signal to the end of the process, in which errors are still sent."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Its connections inherit its keep-alive options, so dead peers are noticed. Raises ForedraftError."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(infos, key=lambda info: info[0] != socket.AF_INET)  # prefer IPv4, as for localhost
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
        raise ForedraftError(
            f"{host}:{port}: cannot listen on this address: {error.strerror}: give another --port"
        ) from None
    return listener


def serve(
    app: FastAPI, listener: socket.socket, *, drain_seconds: float | None = None, tls: TlsFiles | None = None
) -> None:
    """Serve until a signal. The first one ends the server when all requests have finished, at the latest after drain_seconds; the
    second one aborts them."""
    _raise_file_limit(app.state.service.settings.limits.max_connections)
    make_server(app, drain_seconds=drain_seconds, tls=tls).run(sockets=[listener])


def _raise_file_limit(max_connections: int) -> None:
    """Raise the limit on open files, often 1,024 by default, since each connection is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _NUM_OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        if allowed < wanted:
            logger.warning(
                "only %d files can be open at once, which is too few for %d connections: raise the limit (ulimit -n)",
                allowed,
                max_connections,
            )


def make_server(app: FastAPI, *, drain_seconds: float | None = None, tls: TlsFiles | None = None) -> Server:
    """tls: None: plain HTTP."""
    service: Service = app.state.service
    limits = service.settings.limits
    config = uvicorn.Config(
        app,
        http=make_protocol(limits, service.metrics.http),  # type: ignore[arg-type]  # uvicorn accepts a factory
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_seconds,
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
    """A uvicorn server that drains at the first signal and stops at the second."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_seconds: float | None) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between any two bytecodes, so it only schedules the work."""
        self.end()

    def end(self) -> None:
        """Drain; at the second call, stop. May be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop if self.should_exit else self._drain)
        self.should_exit = True

    def _drain(self) -> None:
        self._service.drain()
        if self._loop is not None and self._drain_seconds is not None:
            self._loop.call_later(self._drain_seconds, self._stop)

    def _stop(self) -> None:
        assert self._loop is not None
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)
            connection.stop()
        self._ending = self._loop.create_task(self._service.stop())
        self._loop.call_later(_STOP_SECONDS, setattr, self, "force_exit", True)
