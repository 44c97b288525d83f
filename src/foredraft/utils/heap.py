"""Returns freed memory to the operating system.

The C library keeps freed memory for later allocations, in fragments. If large blocks of many sizes come and go, as the keys and
values of texts do, a process grows to two or three times the memory that it uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

TRIM_AFTER = 64 << 20
"""Bytes. A trim takes milliseconds; it takes thousands of tokens of texts to free this much."""


def malloc_trim() -> None:
    """Return unused whole pages to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Trims the heap each time TRIM_AFTER bytes have been freed."""

    def __init__(self, trim: Callable[[], None] = malloc_trim) -> None:
        self._trim = trim
        self._num_freed = 0

    def freed(self, num_bytes: int) -> None:
        self._num_freed += num_bytes
        if self._num_freed >= TRIM_AFTER:
            self._num_freed = 0
            self._trim()
