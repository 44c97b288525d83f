"""Gives memory that was freed back to the system.

The C library keeps what is freed for later, in pieces: where large blocks of many sizes come and go, as keys and values of texts
do, a process grows to two or three times what it uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

TRIM_AFTER = 64 << 20
"""Bytes. A trim takes milliseconds; so much is freed by some thousand tokens of texts."""


def malloc_trim() -> None:
    """Whole pages that nothing uses go back to the system; with a C library that has no such call, nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Trims the heap whenever TRIM_AFTER bytes were freed."""

    def __init__(self, trim: Callable[[], None] = malloc_trim) -> None:
        self._trim = trim
        self._num_freed = 0

    def freed(self, num_bytes: int) -> None:
        self._num_freed += num_bytes
        if self._num_freed >= TRIM_AFTER:
            self._num_freed = 0
            self._trim()
