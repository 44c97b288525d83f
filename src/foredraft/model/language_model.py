"""A Hugging Face decoder that reads ragged batches from our cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.cache import KEY_MULTIPLE, KVCache, MemoryPool
from foredraft.kernels import DrawSpec, Kernels
from foredraft.model.attention import Span
from foredraft.model.demand import Demand
from foredraft.model.library import LibraryBody
from foredraft.model.rows import RowRule
from foredraft.sampling import TokenProbs, choose_with


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
    row_exact: whether a row's bits were seen not to depend on its company (see docs/internals/exactness.md).
    """

    name: str
    vocab_size: int
    context_len: int
    bytes_per_token: int
    row_exact: bool


class Written(NamedTuple):
    """What a model wrote by itself. ids: the tokens behind each read. laws: of every token that was to be drawn, read after
    read, lens[i] rows each; None where none was. A row that was not reached holds anything."""

    ids: list[list[int]]
    token_probs: TokenProbs | None = None


class Body(Protocol):
    """What computes a pass. row_rule: how many rows to hand it. kernels: the compiled ones that its attention runs.
    is_batch_invariant: whether a row's sums are made in one order in any pass, off the CPU too."""

    row_rule: RowRule

    @property
    def is_batch_invariant(self) -> bool: ...

    @property
    def kernels(self) -> Kernels | None: ...

    def __call__(self, ids: list[int], positions: list[int], wanted: list[int], spans: Sequence[Span]) -> Tensor:
        """One flattened ragged batch. wanted: the rows whose logits to give. -> [len(wanted), V]"""

    def take_over(self) -> None:
        """From now on nobody else runs the model."""

    def warm_up(self, demand: Demand) -> None:
        """Make ready what such passes need, so that no request waits for it."""


@runtime_checkable
class WritingBody(Body, Protocol):
    """A body that can go on by itself."""

    def can_write(self, specs: Sequence[DrawSpec]) -> bool:
        """Whether it knows how to choose so."""

    def write(
        self,
        ids: list[int],
        positions: list[int],
        spans: Sequence[Span],
        lens: Sequence[int],
        vocab_size: int,
        specs: Sequence[DrawSpec],
    ) -> Written:
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

    def warm_up(self, demand: Demand) -> None:
        """Make ready what such passes need, so that no request waits for it."""
        self.body.warm_up(demand)

    @property
    def device(self) -> torch.device:
        return torch.device(self.hf.device)

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass goes on by itself after `read` has returned."""
        return self.device.type != "cpu"

    def new_cache(self, pool: MemoryPool) -> KVCache:
        return KVCache(pool, self.traits.bytes_per_token, self.traits.context_len)

    def scratch_cache(self, lengths: Sequence[int]) -> KVCache:
        """Sequences 0.. with room for so many tokens each, in nobody's budget: for a trial, or a measurement."""
        cache = self.new_cache(MemoryPool(0))
        cache.pool.evictables.clear()  # no cycle: what was read goes with the trial, without waiting for the collector
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

    def write(
        self, reads: Sequence[Read], lens: Sequence[int], vocab_size: int, cache: KVCache, specs: Sequence[DrawSpec]
    ) -> Written:
        """Read, and go on: lens[i] >= 1 tokens behind reads[i], of the first vocab_size ids, chosen by ways[i]. The last one
        is not read, the others are in the cache afterwards. A row that is no law (NaN) ends a read's tokens before it.

        The laws are over vocab_size ids, whatever the model's own width.
        """
        if not reads:
            return Written([])
        if self._writing is None or not self._writing.can_write(specs):
            return write_step_by_step(self, reads, lens, vocab_size, cache, specs)
        ids, positions, spans = _flattened(reads, cache, lens)
        with torch.inference_mode():
            written = self._writing.write(ids, positions, spans, lens, vocab_size, specs)
        for read, span, tokens in zip(reads, spans, written.ids, strict=True):
            span.region.tokens.extend([*read.tokens, *tokens[:-1]])
        return written


def write_step_by_step(
    model: LanguageModel,
    reads: Sequence[Read],
    lens: Sequence[int],
    vocab_size: int,
    cache: KVCache,
    specs: Sequence[DrawSpec],
) -> Written:
    """LanguageModel.write, a pass for each token."""
    ids: list[list[int]] = [[] for _ in reads]
    token_probs: dict[tuple[int, int], Tensor] = {}
    open_reads = {i: replace(read, num_logits=1) for i, read in enumerate(reads)}
    for step in range(max(lens)):
        logits = model.read(list(open_reads.values()), cache)[:, :vocab_size]
        tokens, found = choose_with([specs[i] for i in open_reads], step, logits)
        for row, (i, token) in enumerate(zip(list(open_reads), tokens, strict=True)):
            if row in found:
                token_probs[i, step] = found[row]
            if token >= 0:
                ids[i].append(token)
            open_reads[i] = Read(reads[i].seq_id, [token], 1)
            if token < 0 or len(ids[i]) == lens[i]:
                del open_reads[i]
        if not open_reads:
            break
    places = [(i, step) for i, spec in enumerate(specs) if spec.is_drawn for step in range(lens[i])]
    if not token_probs:
        return Written(ids)
    probs = next(iter(token_probs.values())).new_zeros(len(places), vocab_size)
    for row, place in enumerate(places):
        if place in token_probs:
            probs[row, : token_probs[place].shape[0]] = token_probs[place]
    return Written(ids, TokenProbs(probs))


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
        if read.num_logits > length:
            raise RuntimeError(
                f"sequence {read.seq_id}: {read.num_logits} rows of logits are wanted of {length} tokens"
            )
        spans.append(Span(region, len(ids), length, start))
        ids.extend(read.tokens)
        positions.extend(range(start, start + length))
    return ids, positions, spans
