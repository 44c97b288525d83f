"""What a draft server has of each history, as far as its client knows."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

NOTHING = 0
"""The checksum of no tokens."""


class Addition(NamedTuple):
    """The tokens of a history from position `start` on, packed. checksum: of those before."""

    start: int
    checksum: int
    tokens: bytes


class SentHistories:
    """Histories grow at their end, so only what is new is sent. A server that has something else, for a message was lost or it is
    another server by now, sees that by length and checksum, asks for all of it, and gets that at the next step."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def addition(self, seq_id: int, tokens: Sequence[int]) -> Addition:
        """What is to be sent of this history."""
        start, checksum = self._sent.get(seq_id, (0, NOTHING))
        if start > len(tokens):  # another history under the same id
            start, checksum = 0, NOTHING
        return Addition(start, checksum, packed(tokens[start:]))

    def sent(self, seq_id: int, addition: Addition) -> None:
        start, checksum, tokens = addition
        self._sent[seq_id] = start + len(tokens) // 4, checksum_of(tokens, checksum)

    def forget(self, seq_id: int) -> bool:
        """-> whether anything of it was sent"""
        return self._sent.pop(seq_id, None) is not None


def packed(tokens: Sequence[int]) -> bytes:
    """Four bytes each, little-endian. Raises struct.error for what is no id."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpacked(tokens: bytes) -> list[int]:
    """tokens: four bytes each"""
    return list(struct.unpack(f"<{len(tokens) // 4}I", tokens))


def checksum_of(tokens: bytes, before: int = NOTHING) -> int:
    """CRC-32 of packed tokens behind others. before: theirs"""
    return zlib.crc32(tokens, before)
