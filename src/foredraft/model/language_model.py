"""A Hugging Face decoder that reads ragged batches from our cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.cache import KEY_MULTIPLE, KVCache, MemoryPool
from foredraft.kernels import Kernels
from foredraft.model.attention import Span
from foredraft.model.library import LibraryBody
from foredraft.model.rows import RowRule
from foredraft.sampling.search import argmax_rows


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of one sequence that follow what the cache holds of it; logits are wanted for the last num_logits."""

    seq_id: int
    tokens: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class Traits:
    """What loading found out about a model.

    vocab_size: the width of its logits. context_len: the longest sequence it can read. bytes_per_token: of cache.
    row_exact: whether a row's bits were seen not to depend on its company (see docs/exactness.md).
    """

    name: str
    vocab_size: int
    context_len: int
    bytes_per_token: int
    row_exact: bool


class Body(Protocol):
    """What computes a pass. row_rule: how many rows to hand it. kernels: the compiled ones that its attention runs."""

    row_rule: RowRule

    @property
    def kernels(self) -> Kernels | None: ...

    def __call__(self, ids: list[int], positions: list[int], wanted: list[int], spans: Sequence[Span]) -> Tensor:
        """One flattened ragged batch. wanted: the rows whose logits to give. -> [len(wanted), V]"""

    def take_over(self) -> None:
        """From now on nobody else runs the model."""


@runtime_checkable
class WritingBody(Body, Protocol):
    """A body that can go on by itself."""

    def write(
        self, ids: list[int], positions: list[int], spans: Sequence[Span], lens: Sequence[int], vocab_size: int
    ) -> list[list[int]]:
        """See LanguageModel.write."""


class LanguageModel:
    """Tokens in, logits out. body: None runs the Hugging Face model itself, which stays as its owner made it."""

    def __init__(self, hf: PreTrainedModel, traits: Traits, body: Body | None = None) -> None:
        self.hf = hf
        self.traits = traits
        self.body = body or LibraryBody(hf)
        self._writing = self.body if isinstance(self.body, WritingBody) else None

    def take_over(self) -> None:
        """From now on the model reads for us alone."""
        self.body.take_over()

    @property
    def device(self) -> torch.device:
        return torch.device(self.hf.device)

    def new_cache(self, pool: MemoryPool) -> KVCache:
        return KVCache(pool, self.traits.bytes_per_token, self.traits.context_len)

    def scratch_cache(self, lengths: Sequence[int]) -> KVCache:
        """Sequences 0.. with room for so many tokens each, in nobody's budget: for a trial, or a measurement."""
        cache = self.new_cache(MemoryPool(0))
        for seq_id, length in enumerate(lengths):
            cache.region(seq_id).resize(-(-length // KEY_MULTIPLE) * KEY_MULTIPLE)
        return cache

    def read(self, reads: Sequence[Read], cache: KVCache) -> Tensor:
        """One pass over all reads; afterwards the cache holds their tokens too. Room must have been reserved.

        -> logits [sum(num_logits), V], read after read
        """
        ids, positions, spans = _flattened(reads, cache)
        wanted = [
            row
            for read, span in zip(reads, spans, strict=True)
            for row in range(span.first_row + span.num_rows - read.num_logits, span.first_row + span.num_rows)
        ]
        padding = self.body.row_rule.pad(len(ids)) - len(ids)
        if padding:
            spans[-1] = replace(spans[-1], padding=padding)
            ids, positions = ids + [0] * padding, positions + positions[-1:] * padding
        with torch.inference_mode():
            logits = self.body(ids, positions, wanted, spans)
        for read, span in zip(reads, spans, strict=True):
            span.region.tokens.extend(read.tokens)
        return logits

    def write(self, reads: Sequence[Read], lens: Sequence[int], vocab_size: int, cache: KVCache) -> list[list[int]]:
        """Read, and go on greedily: lens[i] >= 1 tokens behind reads[i], of the first vocab_size ids. The last one is not
        read, the others are in the cache afterwards. NaN logits end a read's tokens before them."""
        if not reads:
            return []
        if self._writing is None:
            return self._write_step_by_step(reads, lens, vocab_size, cache)
        ids, positions, spans = _flattened(reads, cache, lens)
        with torch.inference_mode():
            written = self._writing.write(ids, positions, spans, lens, vocab_size)
        for read, span, tokens in zip(reads, spans, written, strict=True):
            span.region.tokens.extend([*read.tokens, *tokens[:-1]])
        return written

    def _write_step_by_step(
        self, reads: Sequence[Read], lens: Sequence[int], vocab_size: int, cache: KVCache
    ) -> list[list[int]]:
        written: list[list[int]] = [[] for _ in reads]
        open_reads = {i: replace(read, num_logits=1) for i, read in enumerate(reads)}
        while open_reads:
            logits = self.read(list(open_reads.values()), cache)[:, :vocab_size]
            best = argmax_rows(logits)
            is_nan = logits.gather(1, best[:, None])[:, 0].isnan()
            for i, token, failed in zip(list(open_reads), best.tolist(), is_nan.tolist(), strict=True):
                if not failed:
                    written[i].append(token)
                open_reads[i] = Read(reads[i].seq_id, [token], 1)
                if failed or len(written[i]) == lens[i]:
                    del open_reads[i]
        return written


def _flattened(
    reads: Sequence[Read], cache: KVCache, more: Sequence[int] | None = None
) -> tuple[list[int], list[int], list[Span]]:
    """Token ids, positions and spans of one ragged batch. more: how many tokens will be written behind each read."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    for i, read in enumerate(reads):
        region = cache.region(read.seq_id)
        start, length = len(region.tokens), len(read.tokens)
        needed = length if more is None else length + more[i] - 1
        if start + needed > region.capacity:
            raise RuntimeError(f"sequence {read.seq_id}: no room reserved for {needed} more tokens")
        spans.append(Span(region, len(ids), length, start))
        ids.extend(read.tokens)
        positions.extend(range(start, start + length))
    return ids, positions, spans
