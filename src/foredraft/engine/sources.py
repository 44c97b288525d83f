"""Cross attention's keys and values of sources, the texts that an encoder reads, and the memory they take.

A source is read once, as one piece, and never truncated. Sequences with the same source share it while they run. What nobody uses
any more may stay for later sequences with the same source, until its memory is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TypeAlias

from torch import Tensor

from foredraft.engine.memory_pool import MemoryPool

Source: TypeAlias = tuple[int, ...]
"""The ids that an encoder reads; () for a decoder without one."""


class SourceKeys:
    """ids: of the source. layers: its keys [H, len(ids), Dk] and values [H, len(ids), Dv] for each layer of the decoder; empty until
    the encoder has read it. keeps_encoded: whether a drafter wants what the encoder gives: encoded, [len(ids), width]."""

    def __init__(self, ids: Source, *, keeps_encoded: bool = False) -> None:
        self.ids = ids
        self.keeps_encoded = keeps_encoded
        self.encoded: Tensor | None = None
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_users = 0
        self.used_at = 0
        self._addresses: array[int] | None = None

    def addresses(self) -> array[int]:
        """Of the keys and the values of each layer, [layers * 2], for kernels. Raises RuntimeError for a source that was not read."""
        if not self.is_read:
            raise RuntimeError("a pass needs its sources, and the encoder has not read them")
        if self._addresses is None:
            self._addresses = array("q", [t.data_ptr() for layer in sorted(self.layers) for t in self.layers[layer]])
        return self._addresses

    @property
    def is_read(self) -> bool:
        return bool(self.layers)

    @property
    def bytes_per_token(self) -> int:
        return sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self.layers.values() for t in pair)


class SourceStore:
    """The sources of one model's sequences, within a shared budget.

    bytes_per_token: what one token of a source costs over all layers; 0 for a model without an encoder. bytes_held: of all sources.
    bytes_retained: of those that nobody uses. keeps_encoded: see SourceKeys.
    """

    def __init__(self, pool: MemoryPool, bytes_per_token: int, *, keeps_encoded: bool = False) -> None:
        self.bytes_per_token = bytes_per_token
        self._keeps_encoded = keeps_encoded
        self._pool = pool
        self._shared: dict[Source, SourceKeys] = {}
        self._idle: OrderedDict[Source, None] = OrderedDict()
        self.bytes_held = 0
        self.bytes_retained = 0

    @property
    def least_recent_use(self) -> int | None:
        return next((self._shared[ids].used_at for ids in self._idle), None)

    def bytes_to_open(self, ids: Source, *, is_shared: bool = True) -> int:
        """What one more user of this source takes of the memory that is available."""
        in_use = is_shared and ids in self._shared and ids not in self._idle
        return 0 if in_use else self._bytes(ids)

    def acquire(self, ids: Source, *, is_shared: bool = True) -> SourceKeys | None:
        """The source for one more user, who has to release it; None if there is no room. is_shared: others may use it too."""
        if is_shared and ids in self._shared:
            found = self._shared[ids]
            self._take_out(ids)
        elif self._pool.take(self._bytes(ids)):
            found = SourceKeys(ids, keeps_encoded=self._keeps_encoded)
            self.bytes_held += self._bytes(ids)
            if is_shared:
                self._shared[ids] = found
        else:
            return None
        found.num_users += 1
        return found

    def release(self, source: SourceKeys, *, retain: bool) -> None:
        """One user less. retain: the last one leaves it for later users, if it is shared and was read."""
        source.num_users -= 1
        if source.num_users:
            return
        is_shared = self._shared.get(source.ids) is source
        if retain and is_shared and source.is_read:
            source.used_at = self._pool.tick()
            self._idle[source.ids] = None
            self.bytes_retained += self._bytes(source.ids)
        else:
            self._free(source, is_shared=is_shared)

    def evict_oldest(self) -> None:
        """Free the least recently used of the sources that nobody uses, of which there must be one."""
        ids = next(iter(self._idle))
        self._take_out(ids)
        self._free(self._shared[ids], is_shared=True)

    def _take_out(self, ids: Source) -> None:
        if ids in self._idle:
            del self._idle[ids]
            self.bytes_retained -= self._bytes(ids)

    def _free(self, source: SourceKeys, *, is_shared: bool) -> None:
        if is_shared:
            del self._shared[source.ids]
        self.bytes_held -= self._bytes(source.ids)
        self._pool.give(self._bytes(source.ids))

    def _bytes(self, ids: Source) -> int:
        return len(ids) * self.bytes_per_token
