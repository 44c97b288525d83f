"""Histories read by a head with its own KV cache: the common part of the drafters that use such a head.

A head's row P pairs the token at P + 1 with the target's features of P, fused to the head's width. Rows of draft tokens have
something else in place of the features, and are read again once their tokens are accepted: a head never builds on its own guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, in_passes
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Features
from foredraft.heads import CompiledEagle, EagleHead, MtpHead
from foredraft.model import Read

Head = TypeVar("Head", bound=EagleHead | CompiledEagle | MtpHead)


class FusedReader(Generic[Head]):
    """head: memory for its keys and values is taken from the pool. max_rows: the maximum of one pass. context_len: the maximum
    sequence length. A sequence whose history the target has not read yet, or that finds no room in the cache, gets no draft tokens."""

    def __init__(
        self,
        head: Head,
        vocab_size: int,
        pool: MemoryPool,
        context_len: int,
        max_rows: int = 512,
    ) -> None:
        self.taps = head.config.taps
        self._head = head
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._cache = KVCache(pool, head.bytes_per_token, context_len)
        self._num_fused: dict[int, int] = {}
        self._num_ahead = 0  # the last rows with features that were read with draft tokens: to read again

    @property
    def bytes_held(self) -> int:
        """Bytes of the engine's cache memory."""
        return self._cache.bytes_held

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)
        for seq_id in seq_ids:
            self._num_fused.pop(seq_id, None)

    def _has_room(self, draft: Draft) -> bool:
        """Forget rejected tokens, and reserve room for the draft. False if there is none."""
        request = draft.request
        seq_id, tokens = request.seq_id, request.tokens
        num_features = len(_features_of(request))
        # the last row is always read again, since it gives the first draft token
        kept = max(0, min(self._num_fused.get(seq_id, 0) - self._num_ahead, num_features - 1))
        self._cache.keep_prefix_of(seq_id, tokens[1 : num_features + 1], at_most=kept)
        self._num_fused[seq_id] = self._cache.num_held(seq_id)
        if self._cache.reserve(seq_id, len(tokens) - 1 + draft.max_len - 1):
            return True
        self.forget([seq_id])
        return False

    def _fused(self, drafts: Sequence[Draft], at_most: int | None = None) -> tuple[list[Read], Tensor]:
        """The unread tokens that have features of the target, at most so many of each draft, and their fused states [R, H]."""
        reads, features = self._unread(drafts, at_most)
        return reads, self._head.fuse(features[0] if len(features) == 1 else torch.cat(features))

    def _unread(self, drafts: Sequence[Draft], at_most: int | None = None) -> tuple[list[Read], list[Tensor]]:
        """The unread tokens that have features of the target, at most so many of each draft, and these features [R, F]."""
        reads, features = [], []
        for draft in drafts:
            request = draft.request
            start = self._cache.num_held(request.seq_id)
            new = _features_of(request).since(start, at_most)
            end = start + new.shape[0]
            reads.append(Read(request.seq_id, request.tokens[start + 1 : end + 1], 1))
            features.append(new if new.dtype is self._head.dtype else new.to(self._head.dtype))
            self._num_fused[request.seq_id] = end
        return reads, features

    def _num_rows(self, draft: Draft) -> int:
        """The rows that the draft takes of a pass."""
        return self._num_unread(draft)

    def _num_unread(self, draft: Draft) -> int:
        return len(_features_of(draft.request)) - self._cache.num_held(draft.request.seq_id)

    def _passes(self, drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
        """Group the drafts into passes. A draft with more than max_rows unread rows has the excess read first."""
        for draft in drafts:
            while self._num_unread(draft) > self._max_rows:
                self._read_before(draft)
        return in_passes(drafts, self._num_rows, self._max_rows)

    def _read_before(self, draft: Draft) -> None:
        """Read at most max_rows rows, which draft nothing."""
        self._head.read(*self._fused([draft], self._max_rows), self._cache)


def _features_of(request: DraftRequest) -> Features:
    assert request.features is not None
    return request.features
