"""Memory that was freed goes back to the system."""

from __future__ import annotations

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.utils.heap import TRIM_AFTER, HeapTrimmer, malloc_trim


def test_it_trims_once_enough_was_freed() -> None:
    trims: list[None] = []
    heap = HeapTrimmer(lambda: trims.append(None))
    for _ in range(7):
        heap.freed(TRIM_AFTER // 2)
    assert len(trims) == 3


def test_texts_that_end_and_regions_that_move_are_counted() -> None:
    trims: list[None] = []
    pool = MemoryPool(1 << 40, HeapTrimmer(lambda: trims.append(None)))
    cache = KVCache(pool, bytes_per_token=TRIM_AFTER // 64, max_len=4096)
    assert cache.reserve(0, 64)
    assert not trims
    assert cache.reserve(0, 65)
    assert len(trims) == 1
    cache.drop([0])
    assert len(trims) == 2


def test_it_can_be_called() -> None:
    malloc_trim()
