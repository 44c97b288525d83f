"""The memory budget that caches share."""

from __future__ import annotations

import pytest

from foredraft.engine.memory_pool import MemoryPool


def test_the_pool_refuses_more_than_it_has() -> None:
    pool = MemoryPool(10)
    assert pool.take(7)
    assert not pool.take(4)
    assert (pool.used, pool.free) == (7, 3)
    assert pool.take(3)
    assert not pool.take(1)
    pool.give(10)
    assert (pool.used, pool.free) == (0, 10)
    with pytest.raises(RuntimeError):
        pool.give(1)
