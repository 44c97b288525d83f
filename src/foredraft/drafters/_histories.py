"""Histories read by a language model: the common part of the drafters that use one, however they choose their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foredraft.drafters._drafts import Draft, in_passes
from foredraft.drafters._vocabulary import DraftVocabulary, SameVocabulary
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest
from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.engine.stats import PrefixStats
from foredraft.model import LanguageModel, Read
from foredraft.utils.prefix import common_prefix

_WORTH_READING = 64
"""In tokens. If two sequences begin in one call and share at least this many unread tokens, the first reads them before the second
begins."""


class HistoryReader:
    """Caches what a model has read of each sequence, and continues from there.

    model: its logits are cut or padded to vocab_size. max_rows: the maximum of one pass. vocabulary: the model's, if it is not the
    target's. A sequence gets no draft tokens if it exceeds the model's context, has a token that the model does not know, or finds
    no room in the cache.
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
        self._vocabulary = vocabulary or SameVocabulary()
        self.prefix_stats = PrefixStats()

    @property
    def reads_encoder(self) -> bool:
        """See Drafter."""
        return self._model.traits.shares_encoder

    @property
    def bytes_held(self) -> int:
        """Bytes of the engine's cache memory, without retained texts, whose memory is free to whoever needs it."""
        return self._cache.bytes_running

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)
        self._vocabulary.forget(seq_ids)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """Keep the cache of a finished text for texts with the same prefix. Rejected draft tokens, which are not in its history,
        are dropped."""
        self._cache.retain(seq_id, self._vocabulary.history(seq_id, history))
        self._vocabulary.forget([seq_id])

    def drop_retained(self) -> None:
        self._cache.drop_retained()

    def _draft_for(self, request: DraftRequest) -> Draft:
        """An empty draft with its maximum length. The last draft token is never read, so it may lie one past the model's context. The
        length is 0 for a history that the model cannot read."""
        tokens = self._vocabulary.history(request.seq_id, request.tokens) if request.max_len else ()
        room = min(request.max_len, self._model.traits.context_len - len(tokens) + 1) if tokens else 0
        return Draft(request, max(0, room), tokens)

    def _catch_up(self, drafts: list[Draft]) -> list[Draft]:
        """Read every history until at most max_rows of its tokens are unread -> the drafts that have room in the cache"""
        ready: list[Draft] = []
        for draft in drafts:
            seq_id, tokens = draft.request.seq_id, draft.tokens
            if seq_id not in self._cache and not self._begin(draft, ready):
                continue
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

    def _begin(self, draft: Draft, ready: list[Draft]) -> bool:
        """Start a sequence from a prefix that was read for others. A prefix that a draft in `ready` is about to read is read first.
        False if the model cannot read the source, or finds no room for it."""
        tokens, source, is_shared = draft.tokens, self._source_of(draft), _shares_prefix(draft)
        vocab_size = self._model.traits.vocab_size
        if len(source) > self._model.traits.source_len or max(source.ids, default=0) >= vocab_size:
            return False
        if self.reads_encoder and draft.request.encoded is None:
            return False
        fits = self._cache.fits(self._most_held(draft), source, is_shared=is_shared)
        if not self._cache.open(draft.request.seq_id, source, is_shared=is_shared):
            return False
        self._take_encoded(draft.request)
        if not (is_shared and max(tokens) < vocab_size and fits):
            return True
        for other in ready:
            history = other.tokens
            if _shares_prefix(other) and self._source_of(other) == source:
                common = common_prefix(history, tokens, limit=min(len(history), len(tokens)) - 1)
                missing = common - self._cache.num_held(other.request.seq_id)
                if missing >= _WORTH_READING and common - self._cache.num_shared(tokens, source) >= _WORTH_READING:
                    for start in range(0, missing, self._max_rows):
                        self._read_on(other, min(self._max_rows, missing - start))
        self.prefix_stats.record(len(tokens) - 1, self._cache.start(draft.request.seq_id, tokens))
        return True

    def _source_of(self, draft: Draft) -> Source:
        """The source that the model reads; NO_SOURCE if it has no encoder and reads the text alone."""
        return draft.request.source if self._model.has_encoder else NO_SOURCE

    def _take_encoded(self, request: DraftRequest) -> None:
        """Hand over the target's encoder output to the pass that reads the source."""
        source = self._cache.source(request.seq_id)
        if self.reads_encoder and source is not None and not source.is_read:
            source.encoded = request.encoded

    @staticmethod
    def _most_held(draft: Draft) -> int:
        """Tokens in the cache once the draft is written: its last token is not read."""
        return len(draft.tokens) + draft.max_len - 1

    def _read_on(self, draft: Draft, count: int) -> None:
        held = self._cache.num_held(draft.request.seq_id)
        tokens = draft.tokens[held : held + count]
        self._model.read([Read(draft.request.seq_id, tokens, 0)], self._cache)

    def _rest(self, draft: Draft) -> Read:
        """The unread rest of a history, the pending token included."""
        held = self._cache.num_held(draft.request.seq_id)
        return Read(draft.request.seq_id, draft.tokens[held:], 1)

    def _num_rows(self, draft: Draft) -> int:
        """The rows that the draft takes of a pass."""
        return len(draft.tokens) - self._cache.num_held(draft.request.seq_id)

    def _passes(self, drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
        return in_passes(drafts, self._num_rows, self._max_rows)


def _shares_prefix(draft: Draft) -> bool:
    return draft.request.sampler.params.prefix_caching
