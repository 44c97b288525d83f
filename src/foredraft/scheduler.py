"""Who takes part in a step, within a token budget and a memory budget."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from foredraft.cache import KVCache
from foredraft.policy import MEMORY_SHORT, Policy
from foredraft.prefix import common_prefix
from foredraft.sequence import TokenSequence
from foredraft.stats import PrefixStats
from foredraft.step import Work

logger = logging.getLogger("foredraft")

MEMORY_PAUSE = 32
"""Steps for which a drafter that gave up its memory is left alone: taken back at once, it would be asked for again."""

WORTH_WAITING = 64
"""Tokens. Who begins with at least so many that another is just reading waits for it; it would have to read the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: sequences that run at a time. max_batch_tokens: rows of one pass (long prompts are cut)."""

    max_num_seqs: int = 64
    max_batch_tokens: int = 512


Fail = Callable[[TokenSequence, Exception], None]


def _raise(_: TokenSequence, error: Exception) -> None:
    raise error


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
        self.prefix_stats = PrefixStats()

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

    def schedule(self, fail: Fail = _raise) -> list[Work]:
        """fail: ends one sequence, for which no work could be planned; it removes it."""
        works: list[Work] = []
        budget = self._limits.max_batch_tokens
        self._policy.begin(self.running)
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # gave way to one before it
            # everyone behind gets a row at least, so that nobody starves
            behind = len(self.running) - self.running.index(sequence) - 1
            try:
                work = self._plan(sequence, max(1, budget - behind))
            except Exception as error:
                fail(sequence, error)
                continue
            if work is not None:
                works.append(work)
                budget -= work.num_unread + work.max_draft
        while budget > 0 and len(self.running) < self._limits.max_num_seqs:
            waiting = self._next_waiting()
            if waiting is None:
                break
            try:
                work = self._admit(waiting, budget)
            except Exception as error:
                fail(waiting, error)
                continue
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
        new = self._policy.rest(held, MEMORY_SHORT, MEMORY_PAUSE) if held else []
        if new:
            logger.warning("cache memory is short: %s gave up its own for %d steps", ", ".join(new), MEMORY_PAUSE)
        return work if self._reserve(work) else replace(work, max_draft=0)

    def _admit(self, sequence: TokenSequence, budget: int) -> Work | None:
        """Start a waiting sequence if its whole history fits; nobody gives way for it."""
        seq_id, tokens = sequence.seq_id, sequence.tokens
        if not self._cache.fits(len(tokens)):
            return None
        num_found = self._cache.start(seq_id, tokens) if sequence.shares_prefix else 0
        if not self._cache.reserve(seq_id, len(tokens)):
            self._cache.drop([seq_id])
            return None
        self._count(sequence, num_found)
        work = self._cut_to(sequence, budget)
        if not self._reserve(work):
            work = replace(work, max_draft=0)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.begin()
        return work

    def _count(self, sequence: TokenSequence, num_found: int) -> None:
        """Once a sequence: who gave way and comes back finds what it read itself."""
        if sequence.shares_prefix and sequence.num_preemptions == 0:
            sequence.num_cached = num_found
            self.prefix_stats.record(len(sequence.tokens) - 1, num_found)

    def _next_waiting(self) -> TokenSequence | None:
        """The first that does not wait for another to read what they have in common."""
        return next((sequence for sequence in self.waiting if not self._waits(sequence)), None)

    def _waits(self, sequence: TokenSequence) -> bool:
        """It only ever begins to wait for who runs, and waits no more when it runs: so nobody waits in a circle."""
        if sequence.wait_for is None and sequence.shares_prefix:
            self._find_reader(sequence)
        reader, length = sequence.wait_for, sequence.wait_len
        if reader is None:
            return False
        has_read = reader.num_output > 0 or reader.is_finished
        if length is not None:
            has_read = has_read or reader not in self.running or self._cache.num_held(reader.seq_id) >= length
        if has_read:
            sequence.wait_for = sequence.wait_len = None
        return not has_read

    def _find_reader(self, sequence: TokenSequence) -> None:
        """Whoever runs and is about to read what this one would have to read as well: not to wait would cost as much."""
        tokens = sequence.tokens
        for reader in self.running:
            if reader.num_output == 0 and reader.shares_prefix:
                length = common_prefix(reader.tokens, tokens, limit=len(tokens) - 1)
                if length - self._cache.num_held(reader.seq_id) < WORTH_WAITING:
                    continue
                if length - self._cache.num_shared(tokens) >= WORTH_WAITING:
                    sequence.wait_for, sequence.wait_len = reader, length
                    return

    def _cut_to(self, sequence: TokenSequence, budget: int) -> Work:
        # a step that was interrupted may have left draft tokens behind that nobody verified
        tokens = sequence.tokens
        num_unread = self._cache.keep_prefix_of(sequence.seq_id, tokens, at_most=len(tokens) - 1)
        num_read = len(tokens) - num_unread
        if num_unread > budget:
            return Work(sequence, budget, False, 0, num_read=num_read)
        ask = self._policy.ask(sequence)
        return Work(sequence, num_unread, True, min(ask.max_draft, budget - num_unread), ask.drafter, num_read)

    def _reserve(self, work: Work) -> bool:
        held = self._cache.num_held(work.sequence.seq_id)
        return self._cache.reserve(work.sequence.seq_id, held + work.num_unread + work.max_draft)
