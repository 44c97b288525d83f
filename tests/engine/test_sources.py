"""Encoder-decoder sources in the cache: they count in its budget, are shared only by sequences with the same source, and are retained
while there is room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.sources import FeatureSource, Source, TokenSource

BYTES, SOURCE_BYTES = 8, 12
TEXT = list(range(100, 140))
SOURCE, OTHER = TokenSource(tuple(range(30))), TokenSource(tuple(range(1, 31)))


def new_cache(total: int = 1 << 20) -> KVCache:
    return KVCache(MemoryPool(total), BYTES, 400, bytes_per_source_token=SOURCE_BYTES)


def read_source(cache: KVCache, seq_id: int) -> None:
    source = cache.source(seq_id)
    assert source is not None
    source.layers[0] = torch.zeros(1, source.length, 1), torch.zeros(1, source.length, 2)


def begin(cache: KVCache, seq_id: int, source: Source, tokens: Sequence[int], **how: bool) -> int:
    """Start a sequence and write its source and tokens. -> how many tokens were found in the cache"""
    assert cache.open(seq_id, source, **how)
    found = cache.start(seq_id, tokens)
    assert cache.reserve(seq_id, len(tokens))
    if not cache.source(seq_id).is_read:  # type: ignore[union-attr]
        read_source(cache, seq_id)
    region = cache.region(seq_id)
    rows = len(tokens) - found
    region.write(0, torch.ones(1, rows, 1), torch.ones(1, rows, 1), found)
    region.tokens.extend(tokens[found:])
    return found


def test_a_shared_source_counts_once_in_the_budget() -> None:
    cache = new_cache()
    begin(cache, 0, SOURCE, TEXT)
    used = cache.pool.used
    assert used == cache.bytes_for(len(TEXT), len(SOURCE)) == cache.bytes_running
    assert cache.open(1, SOURCE)
    assert cache.source(1) is cache.source(0)
    assert cache.pool.used == used
    cache.drop([0])
    assert cache.source(1) is not None
    assert cache.pool.used == len(SOURCE) * SOURCE_BYTES
    cache.drop([1])
    assert cache.pool.used == cache.bytes_held == 0


def test_a_prefix_is_shared_only_with_the_same_source() -> None:
    cache = new_cache()
    begin(cache, 0, SOURCE, TEXT)
    assert cache.num_shared([*TEXT, 7], SOURCE) == len(TEXT)
    assert cache.num_shared([*TEXT, 7], OTHER) == cache.num_shared([*TEXT, 7]) == 0
    assert begin(cache, 1, OTHER, TEXT) == 0
    assert begin(cache, 2, SOURCE, [*TEXT[:20], 3, 4]) == 20
    cache.retain(0, TEXT)
    cache.drop([2])
    assert begin(cache, 3, OTHER, [*TEXT, 9]) == len(TEXT)  # copied from sequence 1, which is running
    cache.retain(1, TEXT)
    assert begin(cache, 4, SOURCE, [*TEXT, 9]) == len(TEXT)  # takes over the retained region itself
    assert cache.source(4).source == SOURCE  # type: ignore[union-attr]
    assert cache.pool.used == cache.bytes_held


def test_an_unused_source_is_found_again_until_its_memory_is_needed() -> None:
    source, region = 30 * SOURCE_BYTES, 64 * BYTES
    cache = new_cache(total=source + region)
    begin(cache, 0, SOURCE, TEXT[:8])
    kept = cache.source(0)
    cache.retain(0, TEXT[:8])  # the text is too short to be shared, the source is not
    assert cache.bytes_retained == cache.pool.used == source
    assert cache.open(1, SOURCE)
    assert cache.source(1) is kept
    assert kept is not None
    assert kept.is_read
    assert cache.bytes_retained == 0
    cache.retain(1, [])
    begin(cache, 2, OTHER, TEXT[:8])  # needs the memory
    assert cache.bytes_retained == 0
    assert cache.pool.used == source + region
    cache.drop([2])
    assert cache.pool.used == 0


def test_without_room_for_a_source_nothing_changes() -> None:
    cache = new_cache(total=30 * SOURCE_BYTES + 64 * BYTES)
    begin(cache, 0, SOURCE, TEXT)
    used = cache.pool.used
    assert not cache.fits(1, OTHER)
    assert not cache.open(1, OTHER)
    assert 1 not in cache
    assert cache.pool.used == used
    assert not cache.fits(1, SOURCE)  # no room for its region either


def test_a_private_source_is_neither_found_nor_retained() -> None:
    cache = new_cache()
    begin(cache, 0, SOURCE, TEXT)
    begin(cache, 1, SOURCE, TEXT, is_shared=False)
    assert cache.source(1) is not cache.source(0)
    cache.retain(1, [])
    assert cache.bytes_retained == 0
    assert cache.open(2, SOURCE)
    assert cache.source(2) is cache.source(0)


def test_a_sequence_that_ends_before_the_encoder_runs_leaves_nothing() -> None:
    cache = new_cache()
    assert cache.open(0, SOURCE)
    cache.retain(0, [])
    assert cache.pool.used == 0


def test_bytes_to_start_count_a_retained_source_but_not_one_in_use() -> None:
    cache = new_cache()
    alone = cache.bytes_to_start(10, SOURCE)
    assert alone == cache.bytes_for(10) + 30 * SOURCE_BYTES
    begin(cache, 0, SOURCE, TEXT)
    assert cache.bytes_to_start(10, SOURCE) == cache.bytes_for(10)
    assert cache.bytes_to_start(10, SOURCE, is_shared=False) == alone
    assert cache.bytes_of(0) == cache.bytes_for(len(TEXT), len(SOURCE))
    cache.retain(0, TEXT)
    assert cache.bytes_to_start(10, SOURCE) == alone  # its memory counts as available until the sequence starts


def test_the_least_recently_used_source_or_region_is_evicted_first() -> None:
    cache = new_cache()
    begin(cache, 0, SOURCE, TEXT)
    cache.retain(0, TEXT)  # the source is older than its region
    begin(cache, 1, OTHER, TEXT)
    cache.retain(1, TEXT)
    held = []
    while cache.bytes_retained:
        before = cache.bytes_retained
        cache.evict_oldest()
        held.append(before - cache.bytes_retained)
    source, region = 30 * SOURCE_BYTES, 64 * BYTES
    assert held == [source, region, source, region]


def test_sounds_are_equal_by_their_bytes_and_shape() -> None:
    features = torch.arange(12.0).view(3, 4)
    sound = FeatureSource(features, 2)
    assert len(sound) == 2
    assert sound.ids == ()
    assert (FeatureSource(features.clone(), 2), hash(FeatureSource(features.clone(), 2))) == (sound, hash(sound))
    other = features.clone()
    other[2, 3] = torch.nextafter(other[2, 3], torch.tensor(99.0))
    for different in (FeatureSource(other, 2), FeatureSource(features.view(4, 3), 2), SOURCE, TokenSource(())):
        assert different != sound
    cache = new_cache()
    assert cache.open(0, sound)
    assert cache.open(1, FeatureSource(features.clone(), 2))
    assert cache.open(2, FeatureSource(other, 2))
    assert cache.source(1) is cache.source(0) is not cache.source(2)
    assert cache.pool.used == 2 * len(sound) * SOURCE_BYTES
