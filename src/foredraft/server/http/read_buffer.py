"""Passes received data to a parser in small chunks, one per iteration of the event loop, so no connection delays the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHUNK_BYTES = 4096
"""A chunk full of one-byte body chunks makes about 700 parser events, which take about 5 ms."""


class ReadBuffer:
    """Buffers received data. Its users pause and resume reads here instead of on the transport. While data is buffered, nothing is
    read from the socket, so the buffer holds at most the data of one read.

    on_chunk: called with each chunk; it may pause or close the buffer.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_chunk: Callable[[bytes], None]
    ):
        self._transport = transport
        self._loop = loop
        self._on_chunk = on_chunk
        self._buffer = bytearray()
        self._is_paused = False
        self._is_reading = True
        self._next_chunk: asyncio.Handle | None = None

    def feed_data(self, data: bytes) -> None:
        self._buffer += data
        if self._next_chunk is None:
            self._pass_chunk()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._update()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._update()

    def close(self) -> None:
        """Drop the buffered data and let the transport read freely."""
        self._buffer.clear()
        self._cancel()
        self.resume_reading()

    def _pass_chunk(self) -> None:
        self._next_chunk = None
        if not self._is_paused and self._buffer:
            chunk = bytes(self._buffer[:CHUNK_BYTES])
            del self._buffer[:CHUNK_BYTES]
            self._on_chunk(chunk)
        self._update()

    def _update(self) -> None:
        if self._is_paused:
            self._cancel()
        elif self._buffer and self._next_chunk is None:
            self._next_chunk = self._loop.call_soon(self._pass_chunk)
        should_read = not self._is_paused and not self._buffer
        if should_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = should_read
            (self._transport.resume_reading if should_read else self._transport.pause_reading)()

    def _cancel(self) -> None:
        if self._next_chunk is not None:
            self._next_chunk.cancel()
            self._next_chunk = None
