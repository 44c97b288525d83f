"""A block drafter writes all its draft tokens in one pass over the target's features (DFlash, z-lab)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal
from foredraft.drafters._slots import Slots, draft_slots, num_places
from foredraft.drafters.context import DrafterContext
from foredraft.engine.cache import KVCache, MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError
from foredraft.heads import DFlashHead
from foredraft.sampling import TokenProbs


class DFlashDrafter:
    """Greedy and seeded requests get certain drafts, the others sampled ones with their probabilities.

    head: with keys and values of its own, which are taken from the pool. context_len: the longest sequence. max_rows: of one pass.
    The whole block is read, as in the head's training, however many of its tokens are asked for. A sequence whose history the
    target has not read yet, or whose cache finds no room, gets a proposal of zero.
    """

    grows_trees = True

    def __init__(
        self, head: DFlashHead, vocab_size: int, pool: MemoryPool, context_len: int, max_rows: int = 512
    ) -> None:
        self.taps = head.config.taps
        self._head = head
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._cache = KVCache(pool, head.bytes_per_token, context_len)

    @classmethod
    def build(cls, context: DrafterContext) -> DFlashDrafter:
        if not isinstance(context.head, DFlashHead):
            raise ForedraftError('method "dflash" needs a DFlash head: give draft_model= its directory or hub id')
        return cls(context.head, context.vocab_size, context.pool, context.context_len, context.max_rows)

    @property
    def bytes_held(self) -> int:
        """Of the engine's cache memory."""
        return self._cache.bytes_held

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, self._room(request)) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0 and self._catch_up(draft.request)]
        size = max(1, self._max_rows // self._head.config.block_size)
        for group in (ready[start : start + size] for start in range(0, len(ready), size)):
            with torch.inference_mode():
                slots = [Slots(draft, self._rows(place, draft)) for place, draft in enumerate(group)]
                draft_slots(slots, self._logits(group), self._vocab_size, token_probs)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)

    def _room(self, request: DraftRequest) -> int:
        """The first places of a block may be forced."""
        left = self._head.config.num_places - request.num_forced
        if not request.has_all_features or left <= 0:
            return 0
        return request.max_len if request.shape is not None else min(request.max_len, left)

    def _catch_up(self, request: DraftRequest) -> bool:
        """Forget the context of tokens that did not stand, and add that of those that did -> whether there is room"""
        assert request.features is not None
        seq_id, length = request.seq_id, len(request.features)
        self._cache.keep_prefix_of(seq_id, request.tokens, at_most=length)
        if not self._cache.reserve(seq_id, length + self._head.config.block_size):
            self.forget([seq_id])
            return False
        for start in range(self._cache.num_held(seq_id), length, self._max_rows):
            end = min(start + self._max_rows, length)
            features = request.features.since(start)[: end - start]
            self._head.inject(self._cache.region(seq_id), request.tokens[start:end], features)
        return True

    def _logits(self, drafts: Sequence[Draft]) -> Tensor:
        """[len(drafts) * block_size, V]"""
        requests = [draft.request for draft in drafts]
        pending = [request.tokens[len(request.tokens) - 1 - request.num_forced] for request in requests]
        logits = self._head.read([request.seq_id for request in requests], pending, self._cache)
        return self._head.on_target(logits.flatten(0, 1))

    def _rows(self, place: int, draft: Draft) -> range:
        """Of these logits, for the draft at this place."""
        config, num_forced = self._head.config, draft.request.num_forced
        first = (place + 1) * config.block_size - config.num_places + num_forced
        return range(first, first + min(num_places(draft), config.num_places - num_forced))
