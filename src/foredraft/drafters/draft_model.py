"""A small language model drafts for the whole batch at once, with its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters._constrained import held
from foredraft.drafters.context import DrafterContext
from foredraft.engine.cache import MemoryPool
from foredraft.engine.proposal import CERTAIN, DraftRequest, Proposal
from foredraft.engine.stats import PrefixStats
from foredraft.errors import ForedraftError
from foredraft.model import LanguageModel, Read
from foredraft.sampling import (
    Row,
    TokenProbs,
    adjusted,
    checked_ids,
    choose,
    draw_specs,
    joined,
    pick,
    sampled_groups,
    select,
    token_probs_of,
)
from foredraft.utils.prefix import common_prefix

_WORTH_READING = 64
"""Tokens. Where two begin in one call and have so many in common, the first reads them before the second begins."""


@dataclass(slots=True)
class _Draft:
    """One request's draft in the making. prob_rows: as in Proposal."""

    request: DraftRequest
    max_len: int
    ids: list[int] = field(default_factory=list)
    prob_rows: list[int] = field(default_factory=list)
    is_open: bool = True

    @property
    def shares_prefix(self) -> bool:
        return self.request.sampler.params.prefix_caching

    @property
    def is_written(self) -> bool:
        """Whether the draft model can write all of it in one call: nothing changes its logits but a constraint."""
        return not self.request.sampler.has_logits_processors

    @property
    def row(self) -> Row:
        return Row(self.request.sampler, self.request.tokens, self.ids)

    def append(self, token: int, prob_row: int, *, row_failed: bool) -> None:
        """One more token; a row in which the draft model gave NaN, or a user's processor failed, ends the draft before it."""
        if row_failed:
            self.is_open = False
            return
        self.ids.append(token)
        self.prob_rows.append(prob_row)


class DraftModelDrafter:
    """Classic speculation with a draft model (arXiv:2211.17192): greedy and seeded requests get certain drafts (given
    the history and the shared noise there is nothing random in them), the others sampled ones with their probabilities.

    model: shares the target's vocabulary; its logits are cut or filled up to vocab_size. max_rows: of one pass.
    A sequence past the model's context, one with a token the model does not know, or one whose cache finds no room, gets
    a proposal of zero.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, pool: MemoryPool, max_rows: int = 512) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._cache = model.new_cache(pool)
        self._max_rows = max_rows
        self.prefix_stats = PrefixStats()

    @classmethod
    def build(cls, context: DrafterContext) -> DraftModelDrafter:
        if context.draft_model is None:
            raise ForedraftError('method "draft_model" needs a draft model: give draft_model=')
        return cls(context.draft_model, context.vocab_size, context.pool, context.max_rows)

    @property
    def bytes_held(self) -> int:
        """Of the engine's cache memory, without what is retained, which is anybody's who needs it."""
        return self._cache.bytes_running

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [_Draft(request, self._room(request)) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = self._catch_up([draft for draft in drafts if draft.max_len > 0])
        self._write([draft for draft in ready if draft.is_written], token_probs)
        self._sample_all([draft for draft in ready if not draft.is_written], token_probs)
        return _as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """Keep what is held of a text that ended for those that begin like it. Draft tokens that did not stand are no
        part of its history, and go."""
        self._cache.retain(seq_id, history)

    def drop_retained(self) -> None:
        self._cache.drop_retained()

    def _room(self, request: DraftRequest) -> int:
        """The last draft token is never read, so it may lie one past the model's context."""
        return max(0, min(request.max_len, self._model.traits.context_len - len(request.tokens) + 1))

    def _catch_up(self, drafts: list[_Draft]) -> list[_Draft]:
        """Read every history up to its pending token, in passes of at most max_rows; drop drafts without room."""
        ready: list[_Draft] = []
        for draft in drafts:
            seq_id, tokens = draft.request.seq_id, draft.request.tokens
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

    def _begin(self, draft: _Draft, ready: list[_Draft]) -> None:
        """Find what was read for others; what one of those who are ready is about to read too, it reads now."""
        tokens = draft.request.tokens
        known = max(tokens) < self._model.traits.vocab_size
        if not (draft.shares_prefix and known and self._cache.fits(self._most_held(draft))):
            return
        for other in ready:
            history = other.request.tokens
            if other.shares_prefix:
                common = common_prefix(history, tokens, limit=min(len(history), len(tokens)) - 1)
                missing = common - self._cache.num_held(other.request.seq_id)
                if missing >= _WORTH_READING and common - self._cache.num_shared(tokens) >= _WORTH_READING:
                    for start in range(0, missing, self._max_rows):
                        self._read_on(other, min(self._max_rows, missing - start))
        self.prefix_stats.record(len(tokens) - 1, self._cache.start(draft.request.seq_id, tokens))

    @staticmethod
    def _most_held(draft: _Draft) -> int:
        """Tokens in the cache when the draft is written: its last one is not read."""
        return len(draft.request.tokens) + draft.max_len - 1

    def _read_on(self, draft: _Draft, count: int) -> None:
        held = self._cache.num_held(draft.request.seq_id)
        tokens = draft.request.tokens[held : held + count]
        self._model.read([Read(draft.request.seq_id, tokens, 0)], self._cache)

    def _write(self, drafts: list[_Draft], token_probs: list[TokenProbs]) -> None:
        """Drafts that the model writes in one call. It knows of no constraint: a draft is held to that afterwards, and ends where
        it breaks it."""
        for group in self._passes(drafts):
            lens = [draft.max_len for draft in group]
            specs = draw_specs([draft.row for draft in group], lens)
            reads = [self._rest(draft) for draft in group]
            written = self._model.generate(reads, lens, self._vocab_size, self._cache, specs)
            first = _num_rows(token_probs)
            offset = 0  # the first row of this draft, among those of this pass
            for draft, ids, spec in zip(group, written.ids, specs, strict=True):
                drawn_from = (
                    written.token_probs.after(offset) if written.token_probs is not None and spec.is_drawn else None
                )
                draft.ids = held(draft.row, ids, drawn_from)
                draft.prob_rows = [first + offset + i if spec.is_drawn else CERTAIN for i in range(len(draft.ids))]
                offset += len(spec.uniforms)
            if written.token_probs is not None:
                token_probs.append(written.token_probs)

    def _sample_all(self, open_drafts: list[_Draft], token_probs: list[TokenProbs]) -> None:
        parts = [self._model.read([self._rest(d) for d in group], self._cache) for group in self._passes(open_drafts)]
        logits = torch.cat(parts) if parts else None
        while open_drafts:
            assert logits is not None
            self._extend(open_drafts, logits, token_probs)
            open_drafts = [d for d in open_drafts if d.is_open and len(d.ids) < d.max_len]
            reads = [Read(d.request.seq_id, d.ids[-1:], 1) for d in open_drafts]
            logits = self._model.read(reads, self._cache) if reads else None

    def _rest(self, draft: _Draft) -> Read:
        """What is left to read of a history, the pending token included."""
        held = self._cache.num_held(draft.request.seq_id)
        return Read(draft.request.seq_id, draft.request.tokens[held:], 1)

    def _passes(self, drafts: list[_Draft]) -> Iterator[list[_Draft]]:
        """Groups whose rests make passes of at most max_rows rows; a draft is never cut."""
        group, num_rows = list[_Draft](), 0
        for draft in drafts:
            length = len(draft.request.tokens) - self._cache.num_held(draft.request.seq_id)
            if group and num_rows + length > self._max_rows:
                yield group
                group, num_rows = [], 0
            group.append(draft)
            num_rows += length
        if group:
            yield group

    def _extend(self, drafts: list[_Draft], logits: Tensor, token_probs: list[TokenProbs]) -> None:
        """One more token for each draft. logits: [len(drafts), V of the draft model]"""
        logits = _fit(logits, self._vocab_size)
        rows = [draft.row._replace(drafted=list(draft.ids)) for draft in drafts]
        certain = [i for i, row in enumerate(rows) if not row.spec.draws]
        if certain:
            choice = choose(select(logits, certain), [rows[i] for i in certain])
            for r, (i, token) in enumerate(zip(certain, choice.ids.tolist(), strict=True)):
                drafts[i].append(token, CERTAIN, row_failed=r in choice.failed)
        for group in sampled_groups(rows):
            if rows[group[0]].spec.draws:
                self._sample(drafts, rows, group, logits, token_probs)

    def _sample(
        self, drafts: list[_Draft], rows: list[Row], group: list[int], logits: Tensor, token_probs: list[TokenProbs]
    ) -> None:
        group_rows = [rows[i] for i in group]
        group_logits, failed = adjusted(select(logits, group), group_rows)
        probs = token_probs_of(group_logits, group_rows)
        ids, not_a_distribution = checked_ids(pick(probs, group_rows)[0])
        first = _num_rows(token_probs)
        token_probs.append(probs)
        for r, (i, token) in enumerate(zip(group, ids.tolist(), strict=True)):
            drafts[i].append(token, first + r, row_failed=r in failed or r in not_a_distribution)


def _fit(logits: Tensor, vocab_size: int) -> Tensor:
    """The draft model's logits on the target's ids: padding columns are cut, missing ones can never be drafted."""
    width = logits.shape[1]
    if width >= vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=-torch.inf)


def _num_rows(token_probs: list[TokenProbs]) -> int:
    return sum(part.probs.shape[0] for part in token_probs)


def _as_proposal(drafts: list[_Draft], token_probs: list[TokenProbs]) -> Proposal:
    probs = joined(token_probs) if token_probs else None
    return Proposal.of([draft.ids for draft in drafts], [draft.prob_rows for draft in drafts], probs)
