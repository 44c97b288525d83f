"""From a transport to a parser in small pieces, one in each turn of the event loop: no connection holds up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PIECE = 4096
"""Bytes. In chunks of one byte each that is some 700 events of the parser: about 5 ms."""


class Inlet:
    """Stands in the place of the transport where reading is paused and resumed. While something waits here nothing is read,
    so what waits is at most what one read of the socket gave.

    feed: takes a piece; it may pause or close this.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, feed: Callable[[bytes], None]):
        self._transport = transport
        self._loop = loop
        self._feed = feed
        self._waiting = bytearray()
        self._is_paused = False
        self._is_reading = True
        self._turn: asyncio.Handle | None = None

    def receive(self, data: bytes) -> None:
        self._waiting += data
        if self._turn is None:
            self._feed_one()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._update()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._update()

    def close(self) -> None:
        """Forget what waits; from now on reading is the transport's own business."""
        self._waiting.clear()
        self._cancel()
        self.resume_reading()

    def _feed_one(self) -> None:
        self._turn = None
        if not self._is_paused and self._waiting:
            piece = bytes(self._waiting[:PIECE])
            del self._waiting[:PIECE]
            self._feed(piece)
        self._update()

    def _update(self) -> None:
        if self._is_paused:
            self._cancel()
        elif self._waiting and self._turn is None:
            self._turn = self._loop.call_soon(self._feed_one)
        reads = not self._is_paused and not self._waiting
        if reads != self._is_reading and not self._transport.is_closing():
            self._is_reading = reads
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def _cancel(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
