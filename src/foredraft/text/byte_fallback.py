"""Runs of byte tokens, which a byte-fallback vocabulary decodes as a whole."""

from __future__ import annotations

import codecs

from foredraft.text.token_kinds import REPLACEMENT

_MAX_HELD_BYTES = 64


class ByteRun:
    """Consecutive byte tokens of a byte-fallback vocabulary (Llama 2, Gemma, ...).

    The tokenizer decodes such a run as a whole: if any byte is invalid, every byte of the run becomes U+FFFD, even in whole
    characters. So the text of a run is held back until the run ends or an invalid byte arrives. A run of more than
    _MAX_HELD_BYTES valid bytes is no longer held back: its characters are released as they complete, and stay released if a
    later byte is invalid. Only then, and in `IncrementalDecoder._slide`, the text may differ from decode() of all ids.

    begin: where the run begins in the decoder's window. is_decided: later bytes no longer change the text of earlier ones.
    """

    __slots__ = ("_is_blank", "_num_bytes", "_reader", "begin", "is_decided")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.is_decided = False
        self._is_blank = False
        self._num_bytes = 0
        self._reader = codecs.getincrementaldecoder("utf-8")()

    @property
    def pending(self) -> bytes:
        """The bytes at the end that do not form a whole character yet."""
        return b"" if self._is_blank else self._reader.getstate()[0]

    @property
    def is_too_long(self) -> bool:
        return self._num_bytes > _MAX_HELD_BYTES

    def append(self, byte: int) -> bool:
        """Add a byte to an undecided run; False if the run can no longer decode to characters."""
        self._num_bytes += 1
        try:
            self._reader.decode(bytes([byte]))
        except UnicodeDecodeError:
            return False
        return True

    def decide(self, *, is_blank: bool) -> None:
        """is_blank: whether every byte of the run, including later ones, becomes U+FFFD."""
        self.is_decided, self._is_blank = True, is_blank
        self._reader.errors = "replace"

    def read(self, byte: int) -> str:
        """The text that one more byte adds to a decided run."""
        return REPLACEMENT if self._is_blank else self._reader.decode(bytes([byte]))

    def end(self) -> str:
        """The text of the pending bytes of a decided run."""
        return self.pending.decode(errors="replace")
