"""Who takes part in a step, within a token budget and a memory budget."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

from foredraft.cache import KVCache
from foredraft.policy import Policy
from foredraft.sequence import TokenSequence
from foredraft.step import Work


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: sequences that run at a time. max_batch_tokens: rows of one pass (long prompts are cut)."""

    max_num_seqs: int = 64
    max_batch_tokens: int = 512


class Holder(Protocol):
    """Whoever holds memory for sequences, beside the cache: the drafters."""

    def forget(self, seq_ids: list[int]) -> None: ...

    def give_up(self, seq_ids: list[int]) -> list[str]:
        """Forget, to make room -> the names of those who held any."""
        ...


class Scheduler:
    """First come, first served. When memory is short the drafts' memory goes first; then who came last gives way, and
    starts again later."""

    def __init__(self, cache: KVCache, drafters: Holder, policy: Policy, limits: Limits) -> None:
        self._cache = cache
        self._drafters = drafters
        self._policy = policy
        self._limits = limits
        self.waiting: deque[TokenSequence] = deque()
        self.running: list[TokenSequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: TokenSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence that ended, wherever it stands. Its memory is not touched."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """Give up all that is held for a running sequence; it waits at the front and will read its history again."""
        self.running.remove(sequence)
        self._cache.drop([sequence.seq_id])
        self._drafters.forget([sequence.seq_id])
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def schedule(self) -> list[Work]:
        works: list[Work] = []
        budget = self._limits.max_batch_tokens
        self._policy.begin(self.running)
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # gave way to one before it
            # everyone behind gets a row at least, so that nobody starves
            behind = len(self.running) - self.running.index(sequence) - 1
            work = self._plan(sequence, max(1, budget - behind))
            if work is not None:
                works.append(work)
                budget -= work.num_unread + work.max_draft
        while budget > 0 and (waiting := self._next_waiting()) is not None:
            work = self._admit(waiting, budget)
            if work is None:
                break
            works.append(work)
            budget -= work.num_unread + work.max_draft
        return works

    def _plan(self, sequence: TokenSequence, budget: int) -> Work | None:
        """The work of a running sequence, its memory reserved; others give way for it. None: it gave way itself."""
        work = self._cut_to(sequence, budget)
        if self._reserve(work):
            return work
        work = self._give_up_drafts(work)
        while not self._reserve(work):
            last = self.running[-1]
            if last is self.running[0]:
                raise RuntimeError(f"sequence {sequence.seq_id} does not fit into the cache memory alone")
            self.preempt(last)
            if last is sequence:
                return None
        return work

    def _give_up_drafts(self, work: Work) -> Work:
        """A draft is worth less than a sequence that would have to start again: its memory goes first."""
        held = self._drafters.give_up([sequence.seq_id for sequence in self.running])
        if held:
            self._policy.memory_short(held)
        return work if self._reserve(work) else replace(work, max_draft=0)

    def _admit(self, sequence: TokenSequence, budget: int) -> Work | None:
        """Start a waiting sequence if its whole history fits; nobody gives way for it."""
        if len(self.running) >= self._limits.max_num_seqs:
            return None
        if sequence.sampler.params.prompt_logprobs is None:
            self._cache.start(sequence.seq_id, sequence.tokens)
        if not self._cache.reserve(sequence.seq_id, len(sequence.tokens)):
            self._cache.drop([sequence.seq_id])
            return None
        work = self._cut_to(sequence, budget)
        if not self._reserve(work):
            work = replace(work, max_draft=0)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.begin()
        return work

    def _next_waiting(self) -> TokenSequence | None:
        """The first that does not wait for its sibling to read their common prompt."""
        for sequence in self.waiting:
            sibling = sequence.wait_for
            if sibling is None or sibling.num_output > 0 or sibling.is_finished:
                return sequence
        return None

    def _cut_to(self, sequence: TokenSequence, budget: int) -> Work:
        # a step that was interrupted may have left draft tokens behind that nobody verified
        tokens = sequence.tokens
        num_unread = self._cache.keep_prefix_of(sequence.seq_id, tokens, at_most=len(tokens) - 1)
        if num_unread > budget:
            return Work(sequence, budget, False, 0)
        ask = self._policy.ask(sequence)
        return Work(sequence, num_unread, True, min(ask.max_draft, budget - num_unread), ask.drafter)

    def _reserve(self, work: Work) -> bool:
        held = self._cache.num_held(work.sequence.seq_id)
        return self._cache.reserve(work.sequence.seq_id, held + work.num_unread + work.max_draft)
