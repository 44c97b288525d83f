"""Passes come in any size, but CUDA graphs are captured for a few sizes: each pass is padded to the next of these."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Noise(IntEnum):
    """The most that the choice of generated tokens needs: nothing, if all are greedy; uniform numbers; or noise that drafter and verifier
    share."""

    NONE = 0
    OWN = 1
    SHARED = 2


class Bucket(NamedTuple):
    """num_rows: of a pass. num_spans: sequences in it. num_wanted: rows whose logits are computed. depth: tokens that the model
    generates; 0 if it only reads. noise: what they are chosen with. num_slots: the number of slots in the rows' paths (SlotPaths); 0 if
    every row's slot is its position. wants_all: whether the logits of every row are wanted, in order."""

    num_rows: int
    num_spans: int
    num_wanted: int
    depth: int = 0
    noise: Noise = Noise.NONE
    num_slots: int = 0
    wants_all: bool = False

    @property
    def is_contiguous(self) -> bool:
        return not self.num_slots

    @property
    def is_graph(self) -> bool:
        """Whether it is worth a graph, as decoding, verification and drafting are. Prompts come in too many sizes, and they take the GPU
        longer than launching their kernels takes the CPU."""
        if self.depth:
            return self.num_rows <= 2 * self.num_spans
        return self.wants_all and self.num_rows <= min(_MOST_GRAPH_ROWS, _MOST_WIDTH * self.num_spans)


_MOST_GRAPH_ROWS, _MOST_WIDTH = 512, 64


def bucket_for(
    num_rows: int,
    num_spans: int,
    num_wanted: int,
    depth: int = 0,
    noise: Noise = Noise.NONE,
    *,
    num_slots: int = 0,
) -> Bucket:
    """The smallest bucket that holds a pass of this size. Rounding up to a power of two at most doubles the rows, and up to many more
    rows the cost of a pass is that of reading the weights."""
    rows = _power(num_rows)
    # decoding and verification want all of their rows, and those come in few sizes
    all_wanted = num_wanted == num_rows
    wanted = rows if all_wanted else max(_power(num_spans), _power(num_wanted))
    # drafts read one or two rows of each sequence, which should not need two graphs
    wants_all = all_wanted and not depth
    return Bucket(rows, _power(num_spans), wanted, depth, noise, _power(num_slots) if num_slots else 0, wants_all)


def verification_buckets(max_spans: int, max_width: int) -> Iterator[Bucket]:
    """Every bucket needed for plain decoding and verification of up to max_spans sequences, with up to max_width rows each, smallest
    first."""
    buckets = {
        bucket_for(spans * width, spans, spans * width)
        for spans in _sizes(max_spans)
        for width in range(1, max_width + 1)
    }
    yield from sorted(bucket for bucket in buckets if bucket.is_graph)


def drafting_buckets(max_spans: int, max_depth: int) -> Iterator[Bucket]:
    """The same for a draft model that generates up to max_depth tokens, which has two tokens to read after a full acceptance. If it
    cannot generate in one call, it takes one pass per token. Buckets with shared noise are captured when they are first used."""
    buckets = {
        bucket_for(spans * unread, spans, spans, depth, noise)
        for spans in _sizes(max_spans)
        for unread in (1, 2)
        for depth in range(1, max_depth + 1)
        for noise in (Noise.NONE, Noise.OWN)
    }
    yield from verification_buckets(max_spans, 1)
    yield from sorted(bucket for bucket in buckets if bucket.is_graph)


def _sizes(most: int) -> Iterator[int]:
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
