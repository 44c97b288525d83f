"""The last items of a sequence, by their position in the whole sequence."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class RingBuffer(Generic[T]):
    """Keeps the last max_items items. num_all: how many were appended in all."""

    def __init__(self, max_items: int) -> None:
        self._items: deque[T] = deque(maxlen=max_items)
        self.num_all = 0

    @property
    def last(self) -> T | None:
        return self._items[-1] if self._items else None

    def append(self, item: T) -> None:
        self._items.append(item)
        self.num_all += 1

    def skip_to(self, num_all: int) -> None:
        """Drop all items and continue as if num_all items had been appended."""
        self._items.clear()
        self.num_all = num_all

    def since(self, position: int) -> list[T]:
        """The items from this position on that are still kept."""
        return list(islice(self._items, max(0, len(self._items) - (self.num_all - position)), None))
