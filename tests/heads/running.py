"""Runs a head as a drafter does: a pass over its rows, then one row after another, with our cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.heads import EagleHead
from foredraft.model import Read


def cache_for(head: EagleHead, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache with sequences 0, 1, .., each with room for this many rows."""
    bytes_per_token = head.config.bytes_per_token(dtype)
    cache = KVCache(MemoryPool(1 << 24), bytes_per_token, 1024)
    for seq_id, length in enumerate(lengths):
        assert cache.reserve(seq_id, length)
    return cache


def run(
    head: EagleHead, ids: Sequence[int], features: Tensor, chunks: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Run the passes of make_golden.py. chunks: how many rows of the first pass are read at a time; None: all.
    -> states, logits, drafted"""
    cache, num_rows = cache_for(head, [len(ids)]), len(features)
    readings, start = [], 0
    for length in chunks or [num_rows]:
        rows = slice(start, start + length)
        readings.append(head.read([Read(0, ids[rows], length)], head.fuse(features[rows]), cache))
        start += length
    assert start == num_rows
    last = [readings[-1]]
    for token in ids[num_rows:]:
        last.append(head.read([Read(0, [token], 1)], last[-1].states[-1:], cache))
    readings += last[1:]
    return {
        "states": torch.cat([reading.states for reading in readings]),
        "logits": torch.cat([reading.logits for reading in readings]),
        "drafted": torch.stack([head.on_target(reading.logits[-1:])[0].argmax() for reading in last]),
    }
