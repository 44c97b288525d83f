"""Freed memory is returned to the system."""

from __future__ import annotations

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.utils.heap import TRIM_AFTER, HeapTrimmer, malloc_trim


def test_the_heap_is_trimmed_once_enough_memory_was_freed() -> None:
    trims: list[None] = []
    heap = HeapTrimmer(lambda: trims.append(None))
    for _ in range(7):
        heap.freed(TRIM_AFTER // 2)
    assert len(trims) == 3


def test_memory_of_ended_texts_and_moved_regions_is_counted() -> None:
    trims: list[None] = []
    pool = MemoryPool(1 << 40, HeapTrimmer(lambda: trims.append(None)))
    cache = KVCache(pool, bytes_per_token=TRIM_AFTER // 64, max_len=4096)
    assert cache.reserve(0, 64)
    assert not trims
    assert cache.reserve(0, 65)
    assert len(trims) == 1
    cache.drop([0])
    assert len(trims) == 2


def test_malloc_trim_can_be_called() -> None:
    malloc_trim()
