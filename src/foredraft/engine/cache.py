"""The KV cache: the regions of a model's sequences, within a budget of memory.

Each sequence has one region. Only `keep_prefix_of` removes tokens from it.

A new sequence copies the keys and values of a common prefix from another one that is running, or that ended and whose region was
retained. Retained regions are evicted, least recently used first, when their memory is needed.

If a decoder attends to a source, its keys depend on that: only sequences with the same source share a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.region import Region
from foredraft.engine.sources import NO_SOURCE, Source, SourceKeys, SourceStore
from foredraft.utils.prefix import BLOCK, PrefixIndex, common_prefix

_FIRST_CAPACITY = 64


class KVCache:
    """The regions of one model's sequences, within a shared budget.

    bytes_per_token: the size of one token over all layers, its features included. max_len: the maximum length of a sequence.
    taps: the hidden states that are kept as features of every token that is read (see model.Body). bytes_per_source_token: the size
    of one token of a source. new_region: makes a sequence's region. keeps_encoded: whether the encoder's output for a source is kept
    too.
    """

    def __init__(
        self,
        pool: MemoryPool,
        bytes_per_token: int,
        max_len: int,
        taps: Sequence[int] = (),
        bytes_per_source_token: int = 0,
        new_region: Callable[[], Region] = Region,
        *,
        keeps_encoded: bool = False,
    ) -> None:
        self.pool = pool
        self.bytes_per_token = bytes_per_token
        self.max_len = max_len
        self.taps = tuple(taps)
        self._new_region = new_region
        self._regions: dict[int, Region] = {}
        self._sharing: set[int] = set()
        self._sources = SourceStore(pool, bytes_per_source_token, keeps_encoded=keeps_encoded)
        self._retained: OrderedDict[Region, Source] = OrderedDict()
        self._retained_capacity = 0
        self._indices: dict[Source, PrefixIndex[Region]] = {}
        pool.evictables.append(self)

    @property
    def bytes_held(self) -> int:
        return self.bytes_running + self.bytes_retained

    @property
    def bytes_running(self) -> int:
        """The bytes of sequences that have not ended, their sources included."""
        in_regions = sum(region.capacity for region in self._regions.values()) * self.bytes_per_token
        return in_regions + self._sources.bytes_held - self._sources.bytes_retained

    @property
    def bytes_retained(self) -> int:
        return self._retained_capacity * self.bytes_per_token + self._sources.bytes_retained

    @property
    def least_recent_use(self) -> int | None:
        return min(
            (use for use in (self._oldest_region_use, self._sources.least_recent_use) if use is not None), default=None
        )

    @property
    def _oldest_region_use(self) -> int | None:
        return next((region.used_at for region in self._retained), None)

    def bytes_for(self, num_tokens: int, source_len: int = 0) -> int:
        """The fewest bytes that a sequence of this length, with a source of that length, takes from the pool."""
        return _rounded(num_tokens) * self.bytes_per_token + source_len * self._sources.bytes_per_token

    def bytes_to_start(self, num_tokens: int, source: Source = NO_SOURCE, *, is_shared: bool = True) -> int:
        """The bytes that one more sequence of this length takes from the available memory."""
        return self.bytes_for(num_tokens) + self._sources.bytes_to_open(source, is_shared=is_shared)

    def bytes_of(self, seq_id: int) -> int:
        """The bytes that become available if this sequence ends."""
        region = self.region(seq_id)
        is_last = region.source is not None and region.source.num_users == 1
        source_len = len(_source_of(region.source)) if is_last else 0
        return region.capacity * self.bytes_per_token + source_len * self._sources.bytes_per_token

    def fits(self, num_tokens: int, source: Source = NO_SOURCE, *, is_shared: bool = True) -> bool:
        """Whether there is room for one more sequence of this length. source, is_shared: see open."""
        return self.bytes_to_start(num_tokens, source, is_shared=is_shared) <= self.pool.available

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._regions

    def region(self, seq_id: int) -> Region:
        region = self._regions.get(seq_id)
        if region is None:
            region = self._regions[seq_id] = self._new_region()
        return region

    def num_held(self, seq_id: int) -> int:
        region = self._regions.get(seq_id)
        return len(region.tokens) if region else 0

    def features(self, seq_id: int) -> Tensor | None:
        """The features [num_held, F] of the tokens that are held, valid until the next read; None without taps, or if none are held."""
        region = self._regions.get(seq_id)
        if region is None or region.features is None:
            return None
        return region.features[: len(region.tokens)]

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        """See Region.keep_prefix_of."""
        return self.region(seq_id).keep_prefix_of(wanted, at_most)

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Make room for this many tokens of a sequence, evicting retained regions as needed, least recently used first.

        False: there is no room, and nothing has changed.
        """
        region = self.region(seq_id)
        if num_tokens <= region.capacity:
            return True
        generous = _rounded(min(max(num_tokens, 2 * region.capacity), max(self.max_len, num_tokens)))
        return self._grow(region, generous) or self._grow(region, _rounded(num_tokens))

    def open(self, seq_id: int, source: Source, *, is_shared: bool = True) -> bool:
        """Make room for the source of a new sequence, if it has one. False: there is no room, and nothing has changed.

        is_shared: share the source with other sequences that have the same one, now and later.
        """
        if not source or self.region(seq_id).source is not None:
            return True
        self.region(seq_id).source = self._sources.acquire(source, is_shared=is_shared)
        if self.region(seq_id).source is None:
            self.drop([seq_id])
            return False
        return True

    def source(self, seq_id: int) -> SourceKeys | None:
        """The keys and values that a sequence attends to besides those of its own tokens."""
        region = self._regions.get(seq_id)
        return None if region is None else region.source

    def num_shared(self, wanted: Sequence[int], source: Source = NO_SOURCE) -> int:
        """How many of these tokens the cache could share with a sequence that begins now."""
        return self._longest_match(wanted, source)[1]

    def start(self, seq_id: int, wanted: Sequence[int]) -> int:
        """Start a sequence with the part of its prefix that another sequence with the same source (see open) holds, if there is room;
        later sequences may share what it holds. -> how many tokens it holds now; never the last of `wanted`, which is always read.

        A retained region is taken over if `wanted` continues all of it; otherwise the common prefix is copied.
        """
        self._sharing.add(seq_id)
        own = self.region(seq_id)
        holder, length = self._longest_match(wanted, _source_of(own.source))
        if holder is None:
            return 0
        is_retained = holder in self._retained
        if is_retained:
            self._touch(holder)  # so that making room for the copy evicts all others first
        if is_retained and length == len(holder.tokens):
            self._take_out(holder)
            holder.source, own.source = own.source, None
            self._release(own)
            self._regions[seq_id] = holder
        elif self._reserve_with_slack(seq_id, len(wanted)):
            own.copy_prefix(holder, length)
        return self.num_held(seq_id)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """Keep an ended sequence's region for sequences with the same prefix, until its memory is needed. Only the part that belongs
        to the history is kept, and only if no other region holds it too."""
        region = self._regions.pop(seq_id, None)
        self._sharing.discard(seq_id)
        if region is not None:
            region.keep_prefix_of(history)
            source = _source_of(region.source)
            self._close(region, retain=True)
            self._put_in(region, source)

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._release(self._regions.pop(seq_id, None))
            self._sharing.discard(seq_id)

    def evict_oldest(self) -> None:
        """Free the least recently used of the retained regions and sources; there must be at least one."""
        if self._oldest_region_use is None or self._oldest_region_use != self.least_recent_use:
            self._sources.evict_oldest()
            return
        region = next(iter(self._retained))
        self._take_out(region)
        self._release(region)

    def drop_retained(self) -> None:
        while self.least_recent_use is not None:
            self.evict_oldest()

    def _put_in(self, region: Region, source: Source) -> None:
        """Retain a region, unless a retained one holds the same tokens or more; then mark that one as used now."""
        index = self._indices.setdefault(source, PrefixIndex[Region]())
        displaced = index.add(region.tokens, region)
        if displaced is not None and displaced is not region:
            self._unlist(displaced)
            self._release(displaced)
        if displaced is region:
            self._release(region)
            holder = index.find(region.tokens)
            if not index:
                del self._indices[source]
        else:
            self._retained[region] = source
            self._retained_capacity += region.capacity
            holder = region
        if holder is not None:
            self._touch(holder)

    def _touch(self, region: Region) -> None:
        region.used_at = self.pool.tick()
        self._retained.move_to_end(region)

    def _take_out(self, region: Region) -> None:
        source = self._retained[region]
        self._indices[source].remove(region.tokens)
        if not self._indices[source]:
            del self._indices[source]
        self._unlist(region)

    def _unlist(self, region: Region) -> None:
        del self._retained[region]
        self._retained_capacity -= region.capacity

    def _reserve_with_slack(self, seq_id: int, num_tokens: int) -> bool:
        """Reserve a little more than num_tokens, so that the first draft tokens do not make the region move."""
        with_slack = min(num_tokens + _FIRST_CAPACITY, max(self.max_len, num_tokens))
        return self.reserve(seq_id, with_slack) or self.reserve(seq_id, num_tokens)

    def _grow(self, region: Region, capacity: int) -> bool:
        before = region.capacity
        amount = (capacity - before) * self.bytes_per_token
        if not self.pool.take(amount):
            return False
        try:
            region.resize(capacity)
        except BaseException:
            self.pool.give(amount)
            raise
        self.pool.heap.freed(before * self.bytes_per_token)  # it has moved
        return True

    def _release(self, region: Region | None) -> None:
        if region is not None:
            self._close(region, retain=False)
            self.pool.give(region.capacity * self.bytes_per_token)

    def _close(self, region: Region, *, retain: bool) -> None:
        if region.source is not None:
            self._sources.release(region.source, retain=retain)
            region.source = None

    def _longest_match(self, wanted: Sequence[int], source: Source) -> tuple[Region | None, int]:
        """The region with this source that holds the longest prefix of wanted[:-1], and how long that is; (None, 0) if it is shorter
        than a block."""
        limit = len(wanted) - 1
        index, length = self._indices.get(source), 0
        best = None if index is None else index.find(wanted)
        if best is not None:
            length = common_prefix(best.tokens, wanted, limit=limit)
        head = list(wanted[:BLOCK])
        for seq_id in self._sharing:
            region = self._regions.get(seq_id)
            if region is None or _source_of(region.source) != source:
                continue
            if len(region.tokens) > length and region.tokens[:BLOCK] == head:
                common = common_prefix(region.tokens, wanted, limit=limit)
                if common > length:
                    best, length = region, common
        return (best, length) if length >= BLOCK else (None, 0)


def _source_of(keys: SourceKeys | None) -> Source:
    return NO_SOURCE if keys is None else keys.source


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _FIRST_CAPACITY) * _FIRST_CAPACITY
