"""Keys and values of sequences, the tokens they belong to, and the memory they take. Where drafters read hidden states of the
target (features), those lie beside them.

One region per sequence. A region grows by doubling, so nothing is copied per step; what follows its tokens is garbage that the
next read overwrites. A cache shrinks in one function, `keep_prefix_of`.

A sequence copies the keys and values of a common prefix from another one that runs, or that ended and whose region was retained.
Retained regions are evicted, least recently used first, when their memory is needed.

Where a decoder attends to a source, its keys depend on it: only sequences with the same source have a prefix in common.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foredraft.engine.sources import Source, SourceKeys, SourceStore
from foredraft.engine.token_tree import ROOT
from foredraft.utils.heap import HeapTrimmer
from foredraft.utils.prefix import BLOCK, PrefixIndex, common_prefix

KEY_MULTIPLE = 16
"""Attention reads keys in multiples of this, so that a row's bits do not depend on how many keys follow its own."""

_FIRST_CAPACITY = 64
_Layers = dict[int, tuple[Tensor, Tensor]]


class Evictable(Protocol):
    """A holder of memory that can be freed when others need it."""

    @property
    def bytes_retained(self) -> int: ...

    @property
    def least_recent_use(self) -> int | None:
        """When the least recently used part was used, by the pool's clock; None if nothing is retained."""

    def evict_oldest(self) -> None: ...


class MemoryPool:
    """A budget in bytes, shared by every cache of an engine, drafts' included. Invariant: 0 <= used <= total.

    evictables: what they retain is evicted when memory is short, the least recently used of all of them first. heap: hears of
    what is freed, so that a process takes hardly more than the budget.
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
        """The time, which grows with every call."""
        return next(self._clock)

    def take(self, amount: int) -> bool:
        """Take `amount` bytes, evicting as needed. False, and nothing evicted, if there are not that many."""
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
            raise RuntimeError(f"{amount} bytes given back, {self.used} in use")
        self.used -= amount
        self.heap.freed(amount)


class TokenTree(NamedTuple):
    """tokens: siblings differ. parents: for each the index of the one before it, an earlier one, or ROOT."""

    tokens: Sequence[int]
    parents: Sequence[int]

    def path_of(self, wanted: Sequence[int]) -> list[int]:
        """The nodes that these tokens follow from the root, as far as they do."""
        nodes = {
            (parent, token): node for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
        }
        path: list[int] = []
        for token in wanted:
            node = nodes.get((path[-1] if path else ROOT, token))
            if node is None:
                break
            path.append(node)
        return path

    def child_of(self, path: Sequence[int]) -> int | None:
        """The first token behind the last of these nodes; None where there is none."""
        last = path[-1] if path else ROOT
        return next((token for token, parent in zip(self.tokens, self.parents, strict=True) if parent == last), None)


class Region:
    """The keys and values of one sequence, for every layer, and the tokens they belong to.

    features: [capacity, F], hidden states of the same tokens; None where nobody taps them. source: what cross attention sees; None
    where there is none, and for a region that is retained.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.source: SourceKeys | None = None
        self.features: Tensor | None = None
        self.capacity = 0
        self.used_at = 0
        self._layers: _Layers = {}
        self._addresses: array[int] | None = None
        self._compared_with: Sequence[int] | None = None
        self._num_compared = 0
        self._tree: TokenTree | None = None

    @property
    def layers(self) -> list[int]:
        """The layers that have attention, by their index in the model."""
        return list(self._layers)

    @property
    def tree(self) -> TokenTree | None:
        """What was read behind the tokens, of which a path is still to be kept; None: nothing, or a chain, which is among them."""
        return self._tree

    @property
    def bytes_per_token(self) -> int:
        return sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self._layers.values() for t in pair)

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write the keys and values of positions start .. and return those of all positions, padded to KEY_MULTIPLE.

        key: [H, R, Dk], value: [H, R, Dv] -> [H, N, Dk], [H, N, Dv] with N >= start + R, valid until the next write. What lies
        behind start + R is finite and must be masked.
        """
        end = start + key.shape[1]
        keys, values = self._stored(layer, key, value)
        num_keys = padded(end)
        keys[:, start:end] = key
        values[:, start:end] = value
        return keys[:, :num_keys], values[:, :num_keys]

    def write_to(self, layer: int, key: Tensor, value: Tensor, slots: Sequence[int]) -> None:
        """Write keys [H, R, Dk] and values [H, R, Dv] to these slots."""
        keys, values = self._stored(layer, key, value)
        index = torch.tensor(slots, device=key.device)
        keys[:, index] = key
        values[:, index] = value

    def along(self, layer: int, start: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A copy of the keys [H, N, Dk] and values [H, N, Dv] of the positions before start and then of these slots, padded with
        zeros to KEY_MULTIPLE."""
        return tuple(_along(held, start, slots) for held in self._layers[layer])  # type: ignore[return-value]

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            self._layers[layer] = (self._blank(key), self._blank(value))
        return self._layers[layer]

    def branch(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """A tree of tokens was read behind those that are held, token i to slot len(self.tokens) + i, its features too. The next
        call of keep_prefix_of keeps a path of it. parents: for each the index of the one before it, or ROOT: the last that
        is held."""
        self._tree = TokenTree(tokens, parents)

    def write_features(self, hidden: Tensor, start: int) -> None:
        """Write the features of positions start .. hidden: [R, F]."""
        if self.features is None:
            self.features = hidden.new_zeros(self.capacity, hidden.shape[1])
        self.features[start : start + hidden.shape[0]] = hidden

    def addresses(self, num_layers: int, like: Tensor) -> array[int]:
        """For kernels that write by themselves: the addresses of the keys and the values [H, capacity, D] of layers 0..,
        [num_layers * 2], valid until the next resize. like: [H, *, D], with their dtype and device."""
        if self._addresses is None or len(self._addresses) < 2 * num_layers:
            for layer in range(num_layers):
                if layer not in self._layers:
                    self._layers[layer] = (self._blank(like), self._blank(like))
            pairs = (self._layers[layer] for layer in range(num_layers))
            self._addresses = array("q", [tensor.data_ptr() for pair in pairs for tensor in pair])
        return self._addresses if len(self._addresses) == 2 * num_layers else self._addresses[: 2 * num_layers]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is held for one layer: keys [H, len(tokens), Dk] and values [H, len(tokens), Dv]."""
        keys, values = self._layers[layer]
        return keys[:, : len(self.tokens)], values[:, : len(self.tokens)]

    def keep_prefix_of(self, wanted: Sequence[int], at_most: int | None = None) -> int:
        """Forget everything after the common prefix with `wanted`, and after at_most tokens -> how many tokens of wanted are
        still to be computed. Absolute and idempotent.

        `wanted` may have grown since the last call but must not have changed: what was compared once is not compared
        again, so the cost is O(new tokens).
        """
        limit = len(wanted) if at_most is None else min(at_most, len(wanted))
        start = self._num_compared if self._compared_with is wanted else 0
        kept = common_prefix(self.tokens, wanted, start=min(start, limit, len(self.tokens)), limit=limit)
        if self._tree is not None:
            kept += self._keep_path(wanted[kept:limit] if kept == len(self.tokens) else ())
        del self.tokens[kept:]
        self._compared_with, self._num_compared = wanted, kept
        return len(wanted) - kept

    def _keep_path(self, wanted: Sequence[int]) -> int:
        """Append the path of the tree that these tokens follow, and forget the rest of it -> the length of the path"""
        assert self._tree is not None
        path, self._tree = self._tree.path_of(wanted), None
        if path != list(range(len(path))):
            first = len(self.tokens)
            self.move_rows([first + node for node in path], first)
        self.tokens.extend(wanted[: len(path)])
        return len(path)

    @torch.inference_mode()  # passes are read in it, and what they wrote may be changed nowhere else
    def move_rows(self, slots: Sequence[int], first: int) -> None:
        """What lies at these slots goes to the slots from first on, keys, values and features."""
        index, end = torch.tensor(slots), first + len(slots)
        stores = [tensor for pair in self._layers.values() for tensor in pair]
        for tensor in stores if self.features is None else [*stores, self.features[None]]:
            tensor[:, first:end] = tensor[:, index.to(tensor.device)]

    def shared_view(self) -> Region:
        """The same keys and values under a list of tokens of its own, valid until this region is resized. What is read through
        it lies behind the tokens of this region, which stay as they are, until the next read of this region overwrites it."""
        view = copy(self)
        view.tokens = list(self.tokens)
        return view

    def resize(self, capacity: int) -> None:
        """Make room for `capacity` tokens; what is held stays."""
        self._tree = None
        self.copy_rows(self, min(len(self.tokens), capacity), capacity)

    def copy_prefix(self, source: Region, length: int) -> None:
        """Take over the first `length` tokens of another region. Needs that much capacity."""
        self.copy_rows(source, length, self.capacity)
        self.tokens = source.tokens[:length]
        self._compared_with = None

    def copy_rows(self, source: Region, length: int, capacity: int) -> None:
        """Hold the keys, values and features of the first `length` tokens of a region, which may be this one, in a place for
        `capacity` tokens."""
        self._layers, self.capacity, self._addresses = _moved(source._layers, length, capacity), capacity, None
        self.features = _moved_features(source.features, length, capacity)

    def _blank(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], self.capacity, like.shape[2])


class Regions(Protocol):
    """What a pass reads from and writes to: a cache, or views of regions of one."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    def region(self, seq_id: int) -> Region: ...


class KVCache:
    """The regions of one model's sequences, within a shared budget.

    bytes_per_token: what one token costs over all layers, its features included. max_len: the longest a sequence can become.
    taps: the hidden states that are kept as features of every token that is read (see model.Body). bytes_per_source_token: what one
    token of a source costs. new_region: makes a sequence's region. keeps_encoded: whether what the encoder gives of a source is kept
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
        """Of sequences that have not ended, their sources included."""
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
        """The least that a sequence of this length takes from the pool, with a source of that length."""
        return _rounded(num_tokens) * self.bytes_per_token + source_len * self._sources.bytes_per_token

    def bytes_to_start(self, num_tokens: int, source: Source = (), *, is_shared: bool = True) -> int:
        """What one more sequence of this length takes of the memory that is available."""
        return self.bytes_for(num_tokens) + self._sources.bytes_to_open(source, is_shared=is_shared)

    def bytes_of(self, seq_id: int) -> int:
        """What can be had if this sequence ends."""
        region = self.region(seq_id)
        is_last = region.source is not None and region.source.num_users == 1
        source_len = len(_ids_of(region.source)) if is_last else 0
        return region.capacity * self.bytes_per_token + source_len * self._sources.bytes_per_token

    def fits(self, num_tokens: int, source: Source = (), *, is_shared: bool = True) -> bool:
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
        """[num_held, F], of the tokens that are held, until the next read; None without taps, or while nothing is held."""
        region = self._regions.get(seq_id)
        if region is None or region.features is None:
            return None
        return region.features[: len(region.tokens)]

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        """See Region.keep_prefix_of."""
        return self.region(seq_id).keep_prefix_of(wanted, at_most)

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Make room for this many tokens of a sequence, evicting retained regions as needed, least recently used first.

        False leaves everything as it was.
        """
        region = self.region(seq_id)
        if num_tokens <= region.capacity:
            return True
        generous = _rounded(min(max(num_tokens, 2 * region.capacity), max(self.max_len, num_tokens)))
        return self._grow(region, generous) or self._grow(region, _rounded(num_tokens))

    def open(self, seq_id: int, source: Source, *, is_shared: bool = True) -> bool:
        """Make room for what a new sequence attends to. False, if there is none, leaves everything as it was.

        is_shared: with other sequences that have the same source, now and later. Where the source is (), there is nothing to do.
        """
        if not source or self.region(seq_id).source is not None:
            return True
        self.region(seq_id).source = self._sources.acquire(source, is_shared=is_shared)
        if self.region(seq_id).source is None:
            self.drop([seq_id])
            return False
        return True

    def source(self, seq_id: int) -> SourceKeys | None:
        """What a sequence attends to beside its own tokens."""
        region = self._regions.get(seq_id)
        return None if region is None else region.source

    def num_shared(self, wanted: Sequence[int], source: Source = ()) -> int:
        """How many of these tokens the cache could share with a sequence that begins now."""
        return self._longest_match(wanted, source)[1]

    def start(self, seq_id: int, wanted: Sequence[int]) -> int:
        """Begin a sequence with what another one with its source (see open) holds of its prefix, if there is room; later ones may
        share what it holds. -> how many tokens it holds now; never the last of wanted, which is always read.

        A retained region that `wanted` continues is taken over whole; otherwise the common prefix is copied.
        """
        self._sharing.add(seq_id)
        own = self.region(seq_id)
        holder, length = self._longest_match(wanted, _ids_of(own.source))
        if holder is None:
            return 0
        is_retained = holder in self._retained
        if is_retained:
            self._touch(holder)  # so that its own copy takes the room of any other first
        if is_retained and length == len(holder.tokens):
            self._take_out(holder)
            holder.source, own.source = own.source, None
            self._release(own)
            self._regions[seq_id] = holder
        elif self._reserve_with_slack(seq_id, len(wanted)):
            own.copy_prefix(holder, length)
        return self.num_held(seq_id)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """Keep an ended sequence's region for sequences with the same prefix, until its memory is needed: only what it holds of
        the history, and only if no other region holds that too."""
        region = self._regions.pop(seq_id, None)
        self._sharing.discard(seq_id)
        if region is not None:
            region.keep_prefix_of(history)
            source = _ids_of(region.source)
            self._close(region, retain=True)
            self._put_in(region, source)

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._release(self._regions.pop(seq_id, None))
            self._sharing.discard(seq_id)

    def evict_oldest(self) -> None:
        """Free the least recently used of the retained regions and sources, of which there must be one."""
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
        """Retain a region, unless a retained one holds the same tokens and more; that one counts as used now."""
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
        """Reserve a little more, so that the first draft tokens do not make the region move."""
        with_slack = min(num_tokens + _FIRST_CAPACITY, max(self.max_len, num_tokens))
        return self.reserve(seq_id, with_slack) or self.reserve(seq_id, num_tokens)

    def _grow(self, region: Region, capacity: int) -> bool:
        before = region.capacity
        amount = (capacity - before) * self.bytes_per_token
        if not self.pool.take(amount):
            return False
        try:
            region.resize(capacity)
            self.pool.heap.freed(before * self.bytes_per_token)  # it has moved
        except BaseException:
            self.pool.give(amount)
            raise
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
        """The region that holds most of wanted without its last token, behind this source, and how many: at least a block, or
        (None, 0)."""
        limit = len(wanted) - 1
        index, length = self._indices.get(source), 0
        best = None if index is None else index.find(wanted)
        if best is not None:
            length = common_prefix(best.tokens, wanted, limit=limit)
        head = list(wanted[:BLOCK])
        for seq_id in self._sharing:
            region = self._regions.get(seq_id)
            if region is None or _ids_of(region.source) != source:
                continue
            if len(region.tokens) > length and region.tokens[:BLOCK] == head:
                common = common_prefix(region.tokens, wanted, limit=limit)
                if common > length:
                    best, length = region, common
        return (best, length) if length >= BLOCK else (None, 0)


def _ids_of(source: SourceKeys | None) -> Source:
    return () if source is None else source.ids


def padded(num_keys: int) -> int:
    """The next multiple of KEY_MULTIPLE."""
    return -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE


def _along(held: Tensor, start: int, slots: Sequence[int]) -> Tensor:
    """held: [H, capacity, D] -> [H, N, D]"""
    end = start + len(slots)
    ordered = held.new_zeros(held.shape[0], padded(end), held.shape[2])
    ordered[:, :start] = held[:, :start]
    ordered[:, start:end] = held[:, torch.tensor(slots, device=held.device)]
    return ordered


def _moved(layers: _Layers, held: int, capacity: int) -> _Layers:
    return {
        layer: (_moved_rows(keys, held, capacity), _moved_rows(values, held, capacity))
        for layer, (keys, values) in layers.items()
    }


def _moved_features(old: Tensor | None, held: int, capacity: int) -> Tensor | None:
    return None if old is None else _moved_rows(old[None], held, capacity)[0]


def _moved_rows(old: Tensor, held: int, capacity: int) -> Tensor:
    """The first `held` rows in a place for `capacity`; the others are finite, and every row is written once."""
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, :held] = old[:, :held]
    new[:, held:] = 0
    return new


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _FIRST_CAPACITY) * _FIRST_CAPACITY
