"""uvicorn's protocol over h11, with limits of size, number and time, and with ends of connections that lose no answer."""

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

from foredraft.server.errors import ApiError
from foredraft.server.http.connections import Connections
from foredraft.server.http.inlet import Inlet
from foredraft.server.http.parser import Parser
from foredraft.server.logging import log
from foredraft.server.settings import RequestLimits

_LOOK_SECONDS = 0.1
"""From one look at a client that ended its side to the next."""


def make_protocol(limits: RequestLimits, http: Counter) -> Callable[..., asyncio.Protocol]:
    """What uvicorn calls for each connection. http: counts answers, by route and status."""
    connections = Connections(limits.max_connections)

    class Protocol(LimitedProtocol):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.limits, self.http, self.open_connections = limits, http, connections
            self.conn = Parser(limits)

    return Protocol


class LimitedProtocol(H11Protocol):
    """A connection takes requests, one after the other, until it is *ending*: then its last answer was said, and whatever
    still comes is thrown away unread until the client has gone, or some time is over. To close at once would cost clients
    that still send the answer: their system forgets what it has when ours says that nobody reads.
    """

    conn: Parser
    limits: RequestLimits
    http: Counter
    open_connections: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._inlet = Inlet(transport, self.loop, self._feed)
        self.flow = FlowControl(self._inlet)  # type: ignore[arg-type]  # pauses and resumes, nothing else
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._is_ending = self._is_half_closed = False
        self._num_drained: int | None = None  # bytes of a body that nobody wants, while it comes
        if self.open_connections.admit(self):
            self._await_request()
        else:
            message = f"{self.limits.max_connections} connections are open, and all have requests: try again later"
            retry = {"Retry-After": "1"}
            self._close_with(ApiError(503, message, code="too_many_connections", headers=retry))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.leave(self)
        self._is_ending = True
        self._inlet.close()
        for timer in (self._reading, self._writing, self._looking):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self._is_ending

    def data_received(self, data: bytes) -> None:
        if not self._is_ending:
            self._inlet.receive(data)

    def _feed(self, piece: bytes) -> None:
        super().data_received(piece)
        if self._num_drained is not None:
            self._count_drained(len(piece))
        if not self._is_ending and (self.is_answering or self.conn.has_partial) and self._num_drained is None:
            self._await_request()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.refusal is not None and not self._is_ending:
            self._refuse(self.conn.refusal)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.open_connections.served(self)
        if self._is_ending or self.transport.is_closing():
            return
        if self.conn.their_state is h11.SEND_BODY:  # answered without its body: nobody wants it any more
            self._drain()
        elif not self.is_answering:
            if self._is_half_closed:
                self.transport.close()
            elif self.conn.has_partial:
                self._await_request()

    # A body that nobody wants

    def _drain(self) -> None:
        """Throw away what comes of it, so that the client may send its next request over this connection: to end it would take
        that request with it. There are as much and as long of it as of any body; then the connection ends."""
        self._num_drained = 0
        self._restart_clock(self.limits.body_seconds, self.transport.abort)

    def _count_drained(self, count: int) -> None:
        assert self._num_drained is not None
        self._num_drained += count
        if self.is_answering or self.conn.their_state is not h11.SEND_BODY:
            self._num_drained = None
            self._stop_clock()
            if not (self.is_answering or self.conn.has_partial):
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif self._num_drained > self.limits.max_body_bytes and not self._is_ending:
            self._end()

    def shutdown(self) -> None:
        if self._is_ending:
            self.transport.close()
        else:
            super().shutdown()

    def evict(self) -> None:
        self.transport.abort()

    # The end of a connection

    def _refuse(self, error: ApiError) -> None:
        """Answer, outside of any request's own, and end. A request whose body was to come ends as if its client had gone."""
        waiting = self.cycle if self.is_answering else None
        if waiting is None or not waiting.response_started:
            self._say(error)
        if waiting is not None:
            waiting.disconnected = True
            waiting.message_event.set()
        self._end()

    def _end(self) -> None:
        self._is_ending = True
        self._unset_keepalive_if_required()
        self._inlet.close()
        self._restart_clock(self.limits.body_seconds, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _close_with(self, error: ApiError) -> None:
        """For whoever keeps a place that others need: without waiting."""
        self._is_ending = True
        self._say(error)
        self.transport.close()

    def _say(self, error: ApiError) -> None:
        self.transport.write(_raw(error))
        self.http.labels("unknown", str(error.status_code)).inc()
        log("refused", status=error.status_code, error=error.code or error.status_code)

    # A client that ends its side

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: for an answer that is still to be given. Not under TLS, where asyncio closes it."""
        if self._is_ending or self.scheme == "https":
            return False
        if self.is_answering and not self.cycle.more_body:
            self._is_half_closed = True
            self._looking = self._looking or self.loop.call_later(_LOOK_SECONDS, self._probe)
            return True
        if self.is_answering or self.conn.has_partial:
            part = "body" if self.is_answering else "header section"
            self._refuse(ApiError(400, f"the connection ended before the {part} was complete", code="incomplete"))
        return False

    def _probe(self) -> None:
        """Who has gone for good ends its side in the same way as who only has nothing more to say. But to whatever it is
        sent, its system answers that nobody is there. What may be sent without harm is an interim response."""
        if self.is_answering and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim))
        self._look()

    def _look(self) -> None:
        """Nobody reads here any more, so the loop would not notice an error."""
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(_LOOK_SECONDS, self._look)

    # Limits of time

    def _await_request(self) -> None:
        """A clock runs from a request's first byte, or the connection's beginning, to the end of its headers."""
        if self.is_answering:
            self._stop_clock()
        elif self._reading is None:
            self._reading = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _restart_clock(self, seconds: float, then: Callable[[], object]) -> None:
        self._stop_clock()
        self._reading = self.loop.call_later(seconds, then)

    def _stop_clock(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _give_up(self) -> None:
        self._reading = None
        if self.is_answering:
            return
        if self.conn.has_partial:
            message = f"the headers were not there within {self.limits.header_seconds:g} seconds"
            self._close_with(ApiError(408, message, code="timeout"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def _raw(error: ApiError) -> bytes:
    """The whole answer as bytes."""
    headers = {
        "content-type": "application/json",
        "content-length": str(len(error.body)),
        "connection": "close",
        **(error.headers or {}),
    }
    lines = [f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + error.body
