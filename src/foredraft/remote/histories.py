"""How much of each history the client believes the draft server holds."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

NOTHING = 0
"""The checksum of an empty history."""


class Addition(NamedTuple):
    """The tokens of a history from position `start` on, packed. checksum: of the tokens before `start`."""

    start: int
    checksum: int
    tokens: bytes


class SentHistories:
    """Histories only grow, so only their new tokens are sent. If the server holds something else, because a message was lost or the
    server was restarted, it notices by length and checksum and asks for the whole history, which the next step sends."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def addition(self, seq_id: int, tokens: Sequence[int]) -> Addition:
        """The part of this history that has to be sent."""
        start, checksum = self._sent.get(seq_id, (0, NOTHING))
        if start > len(tokens):  # another history under the same id
            start, checksum = 0, NOTHING
        return Addition(start, checksum, packed(tokens[start:]))

    def sent(self, seq_id: int, addition: Addition) -> None:
        start, checksum, tokens = addition
        self._sent[seq_id] = start + len(tokens) // 4, checksum_of(tokens, checksum)

    def forget(self, seq_id: int) -> bool:
        """-> whether any of this history had been sent"""
        return self._sent.pop(seq_id, None) is not None


def packed(tokens: Sequence[int]) -> bytes:
    """Four bytes for each token, little-endian. Raises struct.error for a number that is not a 32-bit id."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpacked(tokens: bytes) -> list[int]:
    """tokens: four bytes each, little-endian"""
    return list(struct.unpack(f"<{len(tokens) // 4}I", tokens))


def checksum_of(tokens: bytes, before: int = NOTHING) -> int:
    """CRC-32 of packed tokens that continue others. before: the checksum of those others"""
    return zlib.crc32(tokens, before)
