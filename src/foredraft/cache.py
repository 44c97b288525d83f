"""Keys and values of sequences; knows whose tokens it holds, and what they cost.

One region per sequence. A region grows by doubling, so nothing is copied per step; whatever follows the tokens it is
said to hold is garbage that the next read overwrites. A cache shrinks in one function, `keep_prefix_of`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KEY_MULTIPLE = 16
"""Attention reads keys in multiples of this, so that a row's bits do not depend on how many keys follow its own."""

_FIRST_CAPACITY = 64
_MAX_RETAINED = 16


class MemoryPool:
    """A budget in bytes, shared by every cache of an engine, drafts' included. Invariant: 0 <= used <= total.

    spares: asked in turn when there is too little; each gives back something it can do without, or says that it has
    nothing.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.spares: list[Callable[[], bool]] = []

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self, amount: int, *, from_spares: bool = True) -> bool:
        """False if there is not so much, also (from_spares) after all spares gave what they had."""
        while amount > self.free:
            if not from_spares or not any(spare() for spare in self.spares):
                return False
        self.used += amount
        return True

    def give(self, amount: int) -> None:
        if amount > self.used:
            raise RuntimeError(f"{amount} bytes given back, {self.used} in use")
        self.used -= amount


class Region:
    """The keys and values of one sequence, for every layer, and the tokens they belong to."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._addresses: array[int] | None = None
        self._compared_with: Sequence[int] | None = None
        self._num_compared = 0

    @property
    def layers(self) -> list[int]:
        """The layers that have attention, by their index in the model."""
        return list(self._layers)

    @property
    def bytes_per_token(self) -> int:
        return sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self._layers.values() for t in pair)

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Put new keys and values at positions start.. and give all there are, padded to KEY_MULTIPLE.

        key: [H, R, Dk], value: [H, R, Dv] -> views [H, N, Dk], [H, N, Dv] with N >= start + R, valid until the next
        write. What lies behind start + R is finite and must be masked.
        """
        end = start + key.shape[1]
        if layer not in self._layers:
            self._layers[layer] = (self._blank(key), self._blank(value))
        keys, values = self._layers[layer]
        keys[:, start:end] = key
        values[:, start:end] = value
        padded = -(-end // KEY_MULTIPLE) * KEY_MULTIPLE
        return keys[:, :padded], values[:, :padded]

    def addresses(self, num_layers: int, num_heads: int, width: int, dtype: torch.dtype) -> array[int]:
        """For a reader that writes by itself: where the keys and the values [H, capacity, D] of layers 0.. begin,
        [num_layers, 2], valid until the next resize."""
        if self._addresses is None:
            like = torch.empty(num_heads, 0, width, dtype=dtype)
            for layer in range(num_layers):
                if layer not in self._layers:
                    self._layers[layer] = (self._blank(like), self._blank(like))
            pairs = (self._layers[layer] for layer in range(num_layers))
            self._addresses = array("q", [tensor.data_ptr() for pair in pairs for tensor in pair])
        return self._addresses

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is held for one layer: keys [H, len(tokens), Dk] and values [H, len(tokens), Dv]."""
        keys, values = self._layers[layer]
        return keys[:, : len(self.tokens)], values[:, : len(self.tokens)]

    def keep_prefix_of(self, wanted: Sequence[int], at_most: int | None = None) -> int:
        """Forget everything after the common prefix with `wanted` (and after at_most tokens); say how many tokens of
        wanted are still to be computed. Absolute and idempotent.

        `wanted` may have grown since the last call but must not have changed: what was compared once is not compared
        again, so the cost is O(new tokens).
        """
        limit = len(wanted) if at_most is None else min(at_most, len(wanted))
        start = self._num_compared if self._compared_with is wanted else 0
        kept = common_prefix(self.tokens, wanted, start=min(start, limit, len(self.tokens)), limit=limit)
        del self.tokens[kept:]
        self._compared_with, self._num_compared = wanted, kept
        return len(wanted) - kept

    def resize(self, capacity: int) -> None:
        """Make room for `capacity` tokens; what is held stays."""
        moved = {
            layer: (self._moved(keys, capacity), self._moved(values, capacity))
            for layer, (keys, values) in self._layers.items()
        }
        self._layers, self.capacity, self._addresses = moved, capacity, None

    def copy_prefix(self, source: Region, length: int) -> None:
        """Take over the first `length` tokens of another region. Needs that much capacity."""
        for layer, (keys, values) in source._layers.items():
            self.write(layer, keys[:, :length], values[:, :length], 0)
        self.tokens = source.tokens[:length]
        self._compared_with = None

    def _blank(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], self.capacity, like.shape[2])

    def _moved(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_zeros(old.shape[0], capacity, old.shape[2])
        held = min(len(self.tokens), capacity)
        new[:, :held] = old[:, :held]
        return new


class KVCache:
    """The regions of one model's sequences, within a shared budget.

    bytes_per_token: what one token costs over all layers. max_len: the longest a sequence can become.
    """

    def __init__(self, pool: MemoryPool, bytes_per_token: int, max_len: int) -> None:
        self.pool = pool
        self.bytes_per_token = bytes_per_token
        self.max_len = max_len
        self._regions: dict[int, Region] = {}
        self._retained: OrderedDict[int, Region] = OrderedDict()
        pool.spares.append(self._drop_oldest)

    @property
    def bytes_held(self) -> int:
        regions = [*self._regions.values(), *self._retained.values()]
        return sum(region.capacity for region in regions) * self.bytes_per_token

    @property
    def bytes_retained(self) -> int:
        return sum(region.capacity for region in self._retained.values()) * self.bytes_per_token

    def bytes_for(self, num_tokens: int) -> int:
        """The least that a sequence of this length takes from the pool."""
        return _rounded(num_tokens) * self.bytes_per_token

    def region(self, seq_id: int) -> Region:
        return self._regions.setdefault(seq_id, Region())

    def num_held(self, seq_id: int) -> int:
        region = self._regions.get(seq_id)
        return len(region.tokens) if region else 0

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        """See Region.keep_prefix_of."""
        return self.region(seq_id).keep_prefix_of(wanted, at_most)

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Room for this many tokens of a sequence; what is retained is given up for it, oldest first.

        False leaves the cache as it was, less what was retained.
        """
        region = self.region(seq_id)
        if num_tokens <= region.capacity:
            return True
        generous = _rounded(min(max(num_tokens, 2 * region.capacity), max(self.max_len, num_tokens)))
        needed = _rounded(num_tokens)
        return self._grow(region, generous, from_spares=False) or self._grow(region, needed, from_spares=True)

    def start(self, seq_id: int, wanted: Sequence[int]) -> None:
        """Begin a sequence with whatever another one already holds of its beginning, if there is room for it.

        A retained region that `wanted` continues is taken over whole; otherwise the common prefix is copied.
        """
        best, length = self._longest_match(wanted)
        if best is None:
            return
        for key, region in self._retained.items():
            if region is best and length == len(region.tokens):
                self._regions[seq_id] = self._retained.pop(key)
                return
        # not from the spares: they might give up the very region that is copied
        if self._grow(self.region(seq_id), _rounded(length), from_spares=False):
            self.region(seq_id).copy_prefix(best, length)

    def retain(self, seq_id: int) -> None:
        """Keep a finished sequence's region for one that begins like it, until the room is needed."""
        region = self._regions.pop(seq_id, None)
        if region is None or not region.tokens:
            self._release(region)
            return
        self._retained[seq_id] = region
        while len(self._retained) > _MAX_RETAINED:
            self._drop_oldest()

    def drop(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._release(self._regions.pop(seq_id, None))

    def drop_retained(self) -> None:
        while self._drop_oldest():
            pass

    def _grow(self, region: Region, capacity: int, *, from_spares: bool) -> bool:
        amount = (capacity - region.capacity) * self.bytes_per_token
        if not self.pool.take(amount, from_spares=from_spares):
            return False
        try:
            region.resize(capacity)
        except BaseException:
            self.pool.give(amount)
            raise
        return True

    def _drop_oldest(self) -> bool:
        """Give up the region that was retained first; False if there is none."""
        if not self._retained:
            return False
        self._release(self._retained.popitem(last=False)[1])
        return True

    def _release(self, region: Region | None) -> None:
        if region is not None:
            self.pool.give(region.capacity * self.bytes_per_token)

    def _longest_match(self, wanted: Sequence[int]) -> tuple[Region | None, int]:
        best, length = None, 0
        for region in [*self._retained.values(), *self._regions.values()]:
            common = common_prefix(region.tokens, wanted)
            if common > length:
                best, length = region, common
        return best, length


def common_prefix(a: Sequence[int], b: Sequence[int], *, start: int = 0, limit: int | None = None) -> int:
    """How many tokens a and b begin with in common, of at most `limit`; the first `start` are known to agree."""
    end = min(len(a), len(b), len(b) if limit is None else limit)
    low = min(start, end)
    b = b if isinstance(b, list) else list(b)  # slices of two kinds never compare equal
    # halving on slices: each compares at C speed, and only what is not yet known to agree
    while low < end:
        middle = (low + end + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            end = middle - 1
    return low


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _FIRST_CAPACITY) * _FIRST_CAPACITY
