"""The read buffer feeds one chunk per iteration of the event loop, and can be paused and resumed."""

from __future__ import annotations

import asyncio
from typing import Any

from foredraft.server.http.read_buffer import CHUNK_BYTES, ReadBuffer


class Transport:
    """Records whether it is reading."""

    def __init__(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True


def trial(steps: Any) -> None:
    async def main() -> None:
        transport, pieces = Transport(), []
        read_buffer = ReadBuffer(transport, asyncio.get_running_loop(), pieces.append)  # type: ignore[arg-type]
        await steps(read_buffer, transport, pieces)

    asyncio.run(main())


def test_a_small_piece_is_fed_at_once() -> None:
    async def steps(read_buffer: ReadBuffer, transport: Transport, pieces: list[bytes]) -> None:
        read_buffer.feed_data(b"abc")
        assert pieces == [b"abc"]
        assert transport.reads

    trial(steps)


def test_other_tasks_run_between_pieces() -> None:
    async def steps(read_buffer: ReadBuffer, transport: Transport, pieces: list[bytes]) -> None:
        data = bytes(range(256)) * 60
        read_buffer.feed_data(data)
        for count in range(1, 5):
            assert len(pieces) == count
            assert transport.reads == (count * CHUNK_BYTES >= len(data))
            await asyncio.sleep(0)
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) == CHUNK_BYTES

    trial(steps)


def test_while_it_is_paused_nothing_is_fed_or_read() -> None:
    async def steps(read_buffer: ReadBuffer, transport: Transport, pieces: list[bytes]) -> None:
        read_buffer.feed_data(b"x" * 3 * CHUNK_BYTES)
        read_buffer.pause_reading()
        await asyncio.sleep(0.01)
        assert len(pieces) == 1
        read_buffer.resume_reading()
        assert not transport.reads  # buffered data comes first
        await asyncio.sleep(0.01)
        assert len(pieces) == 3
        assert transport.reads

    trial(steps)


def test_buffered_data_is_dropped_at_the_end() -> None:
    async def steps(read_buffer: ReadBuffer, transport: Transport, pieces: list[bytes]) -> None:
        read_buffer.feed_data(b"x" * 3 * CHUNK_BYTES)
        read_buffer.close()
        assert transport.reads
        await asyncio.sleep(0.01)
        assert len(pieces) == 1

    trial(steps)
