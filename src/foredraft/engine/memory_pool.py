"""A budget of memory, shared by every cache of an engine."""

from __future__ import annotations

from itertools import count
from typing import Protocol

from foredraft.utils.heap import HeapTrimmer


class Evictable(Protocol):
    """Holds memory that can be freed when others need it."""

    @property
    def bytes_retained(self) -> int: ...

    @property
    def least_recent_use(self) -> int | None:
        """The time, by the pool's clock, when the least recently used part was last used; None if nothing is retained."""

    def evict_oldest(self) -> None: ...


class MemoryPool:
    """A budget in bytes, shared by every cache of an engine, including those of drafters. Invariant: 0 <= used <= total.

    evictables: when memory is short, what they retain is evicted, the least recently used first. heap: is notified when memory is
    freed, so that the process takes hardly more than the budget.
    """

    def __init__(self, total: int, heap: HeapTrimmer | None = None) -> None:
        self.total = total
        self.used = 0
        self.heap = heap or HeapTrimmer()
        self.evictables: list[Evictable] = []
        self._clock = count()

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def bytes_retained(self) -> int:
        """The part of `used` that can be evicted."""
        return sum(evictable.bytes_retained for evictable in self.evictables)

    @property
    def available(self) -> int:
        """Bytes that can be taken: free or retained."""
        return self.free + self.bytes_retained

    def tick(self) -> int:
        """The time, which increases with every call."""
        return next(self._clock)

    def take(self, amount: int) -> bool:
        """Take `amount` bytes, evicting as needed. False: not that many are available, and nothing was evicted."""
        if amount > self.free:
            if amount > self.available:
                return False
            while amount > self.free:
                self._evict_oldest()
        self.used += amount
        return True

    def _evict_oldest(self) -> None:
        uses = ((evictable.least_recent_use, evictable) for evictable in self.evictables)
        candidates = [(use, evictable) for use, evictable in uses if use is not None]
        min(candidates, key=lambda candidate: candidate[0])[1].evict_oldest()

    def give(self, amount: int) -> None:
        if amount > self.used:
            raise RuntimeError(f"{amount} bytes were given back, but only {self.used} are in use")
        self.used -= amount
        self.heap.freed(amount)
