"""uvicorn's h11 protocol with limits on size, number and time, and with connections that close without losing a response."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from prometheus_client import Counter
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from foredraft.server.api_errors import ApiError, shutting_down
from foredraft.server.http.connections import Connections
from foredraft.server.http.cycle_transport import CycleTransport
from foredraft.server.http.parser import Parser
from foredraft.server.http.read_buffer import ReadBuffer
from foredraft.server.request_log import log_event
from foredraft.server.server_settings import RequestLimits

_PROBE_SECONDS = 0.1
"""The interval at which a client that closed its sending side is checked."""


def make_protocol(limits: RequestLimits, http: Counter) -> Callable[..., asyncio.Protocol]:
    """A factory for uvicorn, called for each connection. http: counts responses, by route and status."""
    connections = Connections(limits.max_connections)

    class Protocol(LimitedProtocol):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.limits, self.http, self.open_connections = limits, http, connections
            self.conn = Parser(limits)

    return Protocol


class LimitedProtocol(H11Protocol):
    """A connection that handles one request after another until it is *ending*. Then its last response has been sent, and received
    data is discarded until the client disconnects or a timeout expires. Closing at once would lose the response for a client that
    is still sending: the reset makes its system drop received data (RFC 9112, 9.6).
    """

    conn: Parser
    limits: RequestLimits
    http: Counter
    open_connections: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._read_buffer = ReadBuffer(transport, self.loop, self._parse_chunk)
        self._cycle_transport = CycleTransport(transport, self._close_after_response)
        self.flow = FlowControl(self._read_buffer)  # type: ignore[arg-type]  # it only pauses and resumes
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_ending = self._is_half_closed = False
        self._num_discarded: int | None = None  # bytes of a body that is being discarded
        if self.open_connections.admit(self):
            self._start_header_timer()
        else:
            message = (
                f"{self.limits.max_connections} connections are open, and all are handling requests: try again later"
            )
            retry = {"Retry-After": "1"}
            self._close_with(ApiError(503, message, code="too_many_connections", headers=retry))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.remove(self)
        self._is_ending = True
        self._read_buffer.close()
        for timer in (self._read_timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self._is_ending

    def data_received(self, data: bytes) -> None:
        if not self._is_ending:
            self._read_buffer.feed_data(data)

    def _parse_chunk(self, chunk: bytes) -> None:
        super().data_received(chunk)
        if self._num_discarded is not None:
            self._count_discarded(len(chunk))
        if not self._is_ending and (self.is_answering or self.conn.has_partial) and self._num_discarded is None:
            self._start_header_timer()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            self.cycle.transport = self._cycle_transport  # type: ignore[assignment]  # it only writes and closes
        if self.conn.error is not None and not self._is_ending:
            self._refuse(self.conn.error)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.open_connections.mark_used(self)
        if self._is_ending or self.transport.is_closing():
            self._unset_keepalive_if_required()
            return
        if self.conn.their_state is h11.SEND_BODY:  # the response was sent before the body was read
            self._discard_body()
        elif not self.is_answering:
            if self._is_half_closed:
                self.transport.close()
            elif self.conn.has_partial:
                self._start_header_timer()

    # Discarding a body

    def _discard_body(self) -> None:
        """Discard the rest of a body, so the client can send its next request on this connection; closing it could lose a request
        that was already sent. The limits of size and time are those of any body."""
        self._num_discarded = 0
        self._restart_read_timer(self.limits.body_seconds, self.transport.abort)

    def _count_discarded(self, count: int) -> None:
        assert self._num_discarded is not None
        self._num_discarded += count
        if self.is_answering or self.conn.their_state is not h11.SEND_BODY:
            self._num_discarded = None
            self._stop_read_timer()
            if not (self.is_answering or self.conn.has_partial):
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif self._num_discarded > self.limits.max_body_bytes and not self._is_ending:
            self._end()

    def shutdown(self) -> None:
        if self._is_ending:
            self.transport.close()
        else:
            super().shutdown()

    def stop(self) -> None:
        """Refuse a request whose body is incomplete, since the server ends before the rest may arrive."""
        if self.is_answering and self.cycle.more_body:
            self._refuse(shutting_down())

    def evict(self) -> None:
        self.transport.abort()

    # Ending a connection

    def _refuse(self, error: ApiError) -> None:
        """Send an error and end the connection. A request whose body is incomplete ends as if its client had disconnected."""
        cycle = self.cycle if self.is_answering else None
        if cycle is None or not cycle.response_started:
            self._send_error(error)
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._end()

    def _close_after_response(self) -> None:
        """Close as the response's Connection header says."""
        if self.conn.their_state is h11.SEND_BODY and not self._is_ending:
            self._end()
        else:
            self.transport.close()

    def _end(self) -> None:
        self._is_ending = True
        self._unset_keepalive_if_required()
        self._read_buffer.close()
        self._restart_read_timer(self.limits.body_seconds, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _close_with(self, error: ApiError) -> None:
        """Send an error and close at once, to make room for other connections."""
        self._is_ending = True
        self._send_error(error)
        self.transport.close()

    def _send_error(self, error: ApiError) -> None:
        self.transport.write(_encode_response(error))
        self.http.labels("unknown", str(error.status_code)).inc()
        log_event("refused", status=error.status_code, error=error.code or error.status_code)

    # A client that closes its sending side

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, to send a response. Not with TLS, where asyncio closes it."""
        if self._is_ending or self.scheme == "https":
            return False
        if self.is_answering and not self.cycle.more_body:
            self._is_half_closed = True
            self._probe_timer = self._probe_timer or self.loop.call_later(_PROBE_SECONDS, self._probe)
            return True
        if self.is_answering or self.conn.has_partial:
            part = "body" if self.is_answering else "header section"
            self._refuse(ApiError(400, f"the connection ended before the {part} was complete", code="incomplete"))
        return False

    def _probe(self) -> None:
        """Find out whether the client disconnected or only closed its sending side: the two look the same. The system of a client
        that disconnected answers data with a reset, so send an interim response, which is harmless."""
        if self.is_answering and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim))
        self._check_reset()

    def _check_reset(self) -> None:
        """Poll for a reset: the event loop no longer reads, so it would not notice one."""
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._probe_timer = self.loop.call_later(_PROBE_SECONDS, self._check_reset)

    # Time limits

    def _start_header_timer(self) -> None:
        """The time limit of a request's headers starts with its first byte, or with the connection."""
        if self.is_answering:
            self._stop_read_timer()
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(self.limits.header_seconds, self._on_header_timeout)

    def _restart_read_timer(self, seconds: float, callback: Callable[[], object]) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(seconds, callback)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_header_timeout(self) -> None:
        self._read_timer = None
        if self.is_answering:
            return
        if self.conn.has_partial:
            message = f"the headers did not arrive within {self.limits.header_seconds:g} seconds"
            self._close_with(ApiError(408, message, code="timeout"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _encode_response(error: ApiError) -> bytes:
    """The whole response as bytes."""
    headers = {
        "content-type": "application/json",
        "content-length": str(len(error.body)),
        "connection": "close",
        **(error.headers or {}),
    }
    lines = [f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + error.body
