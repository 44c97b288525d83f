"""What a pass reads, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foredraft.engine.cache import Region, Regions
from foredraft.kernels import CacheSpan, StackBatch


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of one sequence that follow what the cache holds of it; logits are wanted for the last num_logits."""

    seq_id: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class Span:
    """Rows first_row .. first_row + num_rows of a pass belong to the sequence in `region`. start: its tokens that the region holds
    already, at positions and slots 0 .. start. padding: rows after the span that belong to nobody."""

    region: Region
    first_row: int
    num_rows: int
    start: int
    padding: int = 0


class RaggedBatch(NamedTuple):
    """Rows of several sequences, flattened.

    ids: [R]. positions: [R], a row's depth in its text: rotary angles and masks go by it. slots: [R], where a row's keys and
    values are written in its region. spans: cover the rows in order. wanted: the rows whose logits are computed.

    The rows of a span have positions start, start + 1, ..: a chain. Their slots are usually the same numbers, but may be any
    free ones (start <= slot < capacity, all different). A row attends to the positions up to its own, in order of position
    wherever they lie, so its bits do not depend on the slots. The next pass expects slots 0 .. start in order again.

    A tree needs two things more: for each row, which rows of its span are its ancestors (siblings share a position, so a
    position no longer names a slot), and a cache that moves the accepted path to the slots of its positions.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    spans: list[Span]
    wanted: list[int]

    @property
    def is_contiguous(self) -> bool:
        """Whether each row's slot is its position."""
        return self.slots is self.positions or self.slots == self.positions

    def located(self, num_layers: int, like: Tensor) -> StackBatch:
        """The same batch with addresses in place of regions, for kernels that write to the cache themselves. like: an example of
        the keys [H, *, D] of a layer."""
        spans = [
            CacheSpan(s.first_row, s.num_rows, s.start, s.region.capacity, s.region.addresses(num_layers, like))
            for s in self.spans
        ]
        return StackBatch(self.ids, self.positions, None if self.is_contiguous else self.slots, self.wanted, spans)


class Reading(NamedTuple):
    """logits: [len(wanted), V]. hidden: [R, F], the tapped hidden states, concatenated; None without taps."""

    logits: Tensor
    hidden: Tensor | None = None


def flatten(reads: Sequence[Read], cache: Regions, num_generated: Sequence[int] | None = None) -> RaggedBatch:
    """One batch that reads each sequence on from what the cache holds of it. num_generated: how many tokens will be generated after
    each read. Raises RuntimeError if no room has been reserved."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    wanted: list[int] = []
    for i, read in enumerate(reads):
        region = cache.region(read.seq_id)
        start, length = len(region.tokens), len(read.tokens)
        needed = length if num_generated is None else length + num_generated[i] - 1
        if start + needed > region.capacity:
            raise RuntimeError(f"sequence {read.seq_id}: no room reserved for {needed} more tokens")
        num_logits = read.num_logits if num_generated is None else 1
        if num_logits > length:
            raise RuntimeError(f"sequence {read.seq_id}: {num_logits} rows of logits are wanted of {length} tokens")
        spans.append(Span(region, len(ids), length, start))
        ids.extend(read.tokens)
        positions.extend(range(start, start + length))
        wanted.extend(range(len(ids) - num_logits, len(ids)))
    return RaggedBatch(ids, positions, positions, spans, wanted)
