"""Memory for many packed matrices in huge pages."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

_CHUNK = 256 << 20
_ALIGN = 64
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Do not reserve swap for memory that is never written: otherwise a process with many models could not fork."""


class WeightMemory:
    """Hands out memory for matrices from shared chunks. A matrix in an allocation of its own would fill few huge pages, and one of a
    megabyte none at all: it is then read a fifth to a third more slowly.

    A chunk returns to the system when nothing refers to any of its matrices. Pages that are never written take no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """-> [num_bytes] uint8, not initialised, aligned to 64 bytes"""
        start = -(-self._used // _ALIGN) * _ALIGN
        if start + num_bytes > len(self._chunk):
            self._chunk, start = _new_chunk(max(_CHUNK, num_bytes)), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used]

    def give_back(self, taken: Tensor) -> None:
        """Return the memory that was taken last, to be handed out again."""
        self._used -= len(taken)


def _new_chunk(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
