"""Sources, the texts or sounds that an encoder reads: their keys and values for cross attention, and the memory these take.

A source is read once, in one pass, and never truncated. Sequences with the same source share it while they run. A source that is
no longer used may be retained for later sequences with the same one, until its memory is needed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from torch import Tensor

from foredraft.engine.memory_pool import MemoryPool


class Source(Protocol):
    """The input of an encoder, as a value: texts with equal sources share its keys and values. Its length is the number of rows that
    the encoder returns for it, which cross attention reads."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Its tokens; () if it has none."""

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenSource:
    """A text. The encoder returns a row for each token."""

    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)


NO_SOURCE = TokenSource(())
"""The source of a text whose model has no encoder."""


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """A sound, as the output of a feature extractor. Two with the same bytes are equal.

    features: [num_mel_bins, num_frames] float32 on the CPU; must not be changed. num_rows: the rows that the encoder returns.
    """

    features: Tensor = field(compare=False, repr=False)
    num_rows: int
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = blake2b(repr(tuple(self.features.shape)).encode(), digest_size=32)
        found.update(self.features.flatten().numpy().data)
        object.__setattr__(self, "digest", found.digest())  # the class is frozen

    @property
    def ids(self) -> tuple[int, ...]:
        return ()

    def __len__(self) -> int:
        return self.num_rows


class SourceKeys:
    """A source and its keys and values. layers: keys [H, N, Dk] and values [H, N, Dv] for each layer of the decoder, where N is the
    length of the source; empty until the encoder has read it. keeps_encoded: whether a drafter needs the encoder's output,
    `encoded` [N, width]."""

    def __init__(self, source: Source, *, keeps_encoded: bool = False) -> None:
        self.source = source
        self.keeps_encoded = keeps_encoded
        self.encoded: Tensor | None = None
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_users = 0
        self.used_at = 0
        self._addresses: array[int] | None = None

    def addresses(self) -> array[int]:
        """The addresses of the keys and the values of each layer, [layers * 2], for kernels. Raises RuntimeError before the source was
        read."""
        if not self.is_read:
            raise RuntimeError("a pass needs its sources, but the encoder has not read them")
        if self._addresses is None:
            self._addresses = array("q", [t.data_ptr() for layer in sorted(self.layers) for t in self.layers[layer]])
        return self._addresses

    @property
    def length(self) -> int:
        """The length of its source."""
        return len(self.source)

    @property
    def is_read(self) -> bool:
        return bool(self.layers)

    @property
    def bytes_per_token(self) -> int:
        return sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self.layers.values() for t in pair)


class SourceStore:
    """The sources of one model's sequences, within a shared budget.

    bytes_per_token: the size of one token of a source over all layers; 0 for a model without an encoder. bytes_held: the size of all
    sources. bytes_retained: the size of those that are not in use. keeps_encoded: see SourceKeys.
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
        return next((self._shared[source].used_at for source in self._idle), None)

    def bytes_to_open(self, source: Source, *, is_shared: bool = True) -> int:
        """The bytes that one more user of this source takes from the available memory."""
        in_use = is_shared and source in self._shared and source not in self._idle
        return 0 if in_use else self._bytes(source)

    def acquire(self, source: Source, *, is_shared: bool = True) -> SourceKeys | None:
        """The keys of a source for one more user, who has to release them; None if there is no room. is_shared: others may use them
        too."""
        if is_shared and source in self._shared:
            found = self._shared[source]
            self._take_out(source)
        elif self._pool.take(self._bytes(source)):
            found = SourceKeys(source, keeps_encoded=self._keeps_encoded)
            self.bytes_held += self._bytes(source)
            if is_shared:
                self._shared[source] = found
        else:
            return None
        found.num_users += 1
        return found

    def release(self, keys: SourceKeys, *, retain: bool) -> None:
        """Remove one user. retain: the last user leaves the keys for later users, if they are shared and the source was read."""
        keys.num_users -= 1
        if keys.num_users:
            return
        is_shared = self._shared.get(keys.source) is keys
        if retain and is_shared and keys.is_read:
            keys.used_at = self._pool.tick()
            self._idle[keys.source] = None
            self.bytes_retained += self._bytes(keys.source)
        else:
            self._free(keys, is_shared=is_shared)

    def evict_oldest(self) -> None:
        """Free the least recently used of the sources that are not in use; there must be at least one."""
        source = next(iter(self._idle))
        self._take_out(source)
        self._free(self._shared[source], is_shared=True)

    def _take_out(self, source: Source) -> None:
        if source in self._idle:
            del self._idle[source]
            self.bytes_retained -= self._bytes(source)

    def _free(self, keys: SourceKeys, *, is_shared: bool) -> None:
        if is_shared:
            del self._shared[keys.source]
        self.bytes_held -= self._bytes(keys.source)
        self._pool.give(self._bytes(keys.source))

    def _bytes(self, source: Source) -> int:
        return len(source) * self.bytes_per_token
