"""A small language model drafts for the whole batch at once, with its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend, is_written, take_generated
from foredraft.drafters._trees import DraftTree, grow_over, trees_for
from foredraft.drafters._vocabulary import DraftVocabulary, SameVocabulary, SharedVocabulary
from foredraft.drafters.context import DrafterContext
from foredraft.engine.cache import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.stats import PrefixStats
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel, Read
from foredraft.sampling import (
    TokenProbs,
    draw_specs,
)
from foredraft.utils.prefix import common_prefix

_WORTH_READING = 64
"""Tokens. Where two begin in one call and have so many in common, the first reads them before the second begins."""


class DraftModelDrafter:
    """Classic speculation with a draft model (arXiv:2211.17192): greedy and seeded requests get certain drafts (given
    the history and the shared noise there is nothing random in them), the others sampled ones with their probabilities.

    model: its logits are cut or filled up to vocab_size. max_rows: of one pass. vocabulary: the model's, where it is not the
    target's: then it writes chains, a pass for each token. A sequence past the model's context, one with a token the model does not know, or one whose cache finds no room, gets
    a proposal of zero.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab_size: int,
        pool: MemoryPool,
        max_rows: int = 512,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._cache = model.new_cache(pool)
        self._max_rows = max_rows
        self._vocabulary = vocabulary or SameVocabulary(vocab_size)
        self.grows_trees = self._vocabulary.is_the_targets
        self.prefix_stats = PrefixStats()

    @classmethod
    def build(cls, context: DrafterContext) -> DraftModelDrafter:
        model, pair = context.draft_model, context.vocabularies
        if model is None:
            raise ForedraftError('method "draft_model" needs a draft model: give draft_model=')
        vocabulary = None if pair is None else SharedVocabulary(pair, model.traits.vocab_size, context.vocab_size)
        return cls(model, context.vocab_size, context.pool, context.max_rows, vocabulary)

    @property
    def bytes_held(self) -> int:
        """Of the engine's cache memory, without what is retained, which is anybody's who needs it."""
        return self._cache.bytes_running

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [self._draft_for(request) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = self._catch_up([draft for draft in drafts if draft.max_len > 0])
        chains = [draft for draft in ready if draft.request.shape is None]
        self._write([draft for draft in chains if self._is_written(draft)], token_probs)
        self._sample_all([draft for draft in chains if not self._is_written(draft)], token_probs)
        self._grow(trees_for(ready))
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)
        self._vocabulary.forget(seq_ids)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """Keep what is held of a text that ended for those that begin like it. Draft tokens that did not stand are no
        part of its history, and go."""
        self._cache.retain(seq_id, self._vocabulary.history(seq_id, history))
        self._vocabulary.forget([seq_id])

    def drop_retained(self) -> None:
        self._cache.drop_retained()

    def _is_written(self, draft: Draft) -> bool:
        return is_written(draft) and self._vocabulary.is_the_targets

    def _draft_for(self, request: DraftRequest) -> Draft:
        """The last draft token is never read, so it may lie one past the model's context. A history that the model cannot read has
        no draft."""
        tokens = self._vocabulary.history(request.seq_id, request.tokens) if request.max_len else ()
        room = min(request.max_len, self._model.traits.context_len - len(tokens) + 1) if tokens else 0
        return Draft(request, max(0, room), tokens)

    def _catch_up(self, drafts: list[Draft]) -> list[Draft]:
        """Read every history up to its pending token, in passes of at most max_rows; drop drafts without room."""
        ready: list[Draft] = []
        for draft in drafts:
            seq_id, tokens = draft.request.seq_id, draft.tokens
            if seq_id not in self._cache:
                self._begin(draft, ready)
            unread = self._cache.keep_prefix_of(seq_id, tokens, at_most=len(tokens) - 1)
            unknown = max(tokens[len(tokens) - unread :]) >= self._model.traits.vocab_size
            if unknown or not self._cache.reserve(seq_id, self._most_held(draft)):
                self.forget([seq_id])
                continue
            ready.append(draft)
            while unread > self._max_rows:
                self._read_on(draft, self._max_rows)
                unread -= self._max_rows
        return ready

    def _begin(self, draft: Draft, ready: list[Draft]) -> None:
        """Find what was read for others; what one of those who are ready is about to read too, it reads now."""
        tokens = draft.tokens
        known = max(tokens) < self._model.traits.vocab_size
        if not (_shares_prefix(draft) and known and self._cache.fits(self._most_held(draft))):
            return
        for other in ready:
            history = other.tokens
            if _shares_prefix(other):
                common = common_prefix(history, tokens, limit=min(len(history), len(tokens)) - 1)
                missing = common - self._cache.num_held(other.request.seq_id)
                if missing >= _WORTH_READING and common - self._cache.num_shared(tokens) >= _WORTH_READING:
                    for start in range(0, missing, self._max_rows):
                        self._read_on(other, min(self._max_rows, missing - start))
        self.prefix_stats.record(len(tokens) - 1, self._cache.start(draft.request.seq_id, tokens))

    @staticmethod
    def _most_held(draft: Draft) -> int:
        """Tokens in the cache when the draft is written: its last one is not read."""
        return len(draft.tokens) + draft.max_len - 1

    def _read_on(self, draft: Draft, count: int) -> None:
        held = self._cache.num_held(draft.request.seq_id)
        tokens = draft.tokens[held : held + count]
        self._model.read([Read(draft.request.seq_id, tokens, 0)], self._cache)

    def _write(self, drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        """Drafts that the model writes in one call. It knows of no constraint: a draft is held to that afterwards, and ends where
        it breaks it."""
        for group in self._passes(drafts):
            lens = [draft.max_len for draft in group]
            specs = draw_specs([draft.row for draft in group], lens)
            reads = [self._rest(draft) for draft in group]
            written = self._model.generate(reads, lens, self._vocab_size, self._cache, specs)
            take_generated(group, written, specs, token_probs)

    def _sample_all(self, open_drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        logits = self._read_rests(open_drafts) if open_drafts else None
        while open_drafts:
            assert logits is not None
            extend(open_drafts, self._vocabulary.to_target(logits), self._vocab_size, token_probs)
            open_drafts = [draft for draft in open_drafts if draft.has_room]
            reads = [Read(d.request.seq_id, self._vocabulary.to_draft(d.ids[-1:]), 1) for d in open_drafts]
            logits = self._model.read(reads, self._cache) if reads else None

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        if trees:
            grow_over(self._model, self._cache, trees, self._read_rests([t.draft for t in trees]), self._vocab_size)

    def _read_rests(self, drafts: list[Draft]) -> Tensor:
        """[len(drafts), V'], behind each request's tokens"""
        passes = (self._model.read([self._rest(d) for d in group], self._cache) for group in self._passes(drafts))
        return torch.cat(list(passes))

    def _rest(self, draft: Draft) -> Read:
        """What is left to read of a history, the pending token included."""
        held = self._cache.num_held(draft.request.seq_id)
        return Read(draft.request.seq_id, draft.tokens[held:], 1)

    def _passes(self, drafts: list[Draft]) -> Iterator[list[Draft]]:
        """Groups whose rests make passes of at most max_rows rows; a draft is never cut."""
        group, num_rows = list[Draft](), 0
        for draft in drafts:
            length = len(draft.tokens) - self._cache.num_held(draft.request.seq_id)
            if group and num_rows + length > self._max_rows:
                yield group
                group, num_rows = [], 0
            group.append(draft)
            num_rows += length
        if group:
            yield group


def _shares_prefix(draft: Draft) -> bool:
    return draft.request.sampler.params.prefix_caching
