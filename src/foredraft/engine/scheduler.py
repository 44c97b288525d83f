"""The scheduler: chooses the sequences of each step, within a token budget and a memory budget."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from foredraft.engine.cache import KVCache
from foredraft.engine.fairness import FairQueue, fair_shares
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.stats import PrefixStats
from foredraft.engine.step import ScheduledSequence
from foredraft.policy import MEMORY_SHORT, Policy
from foredraft.utils.prefix import common_prefix

logger = logging.getLogger("foredraft")

MEMORY_COOLDOWN = 32
"""The number of steps for which a drafter that gave up its memory is not used, lest it take the memory again at once."""

WORTH_WAITING = 64
"""In tokens: a sequence waits if another one is computing at least this much of a prefix that both share."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: the most sequences that run at a time. max_batch_tokens: the most rows of one pass (long prompts are split)."""

    max_num_seqs: int = 64
    max_batch_tokens: int = 512


Fail = Callable[[TokenSequence, Exception], None]
"""Ends one sequence with an error, and removes it from the scheduler."""


def _raise(_: TokenSequence, error: Exception) -> None:
    raise error


class DraftMemory(Protocol):
    """The drafters, as owners of cache memory."""

    def forget(self, seq_ids: list[int]) -> None: ...

    def give_up(self, seq_ids: list[int]) -> list[str]:
        """Free the memory of these sequences. -> the names of the drafters that had any"""
        ...

    def follows_target(self, name: str) -> bool:
        """Whether this drafter reads what the target computed for a text: it cannot draft before the target has read that."""
        ...


class Scheduler:
    """Schedules fairly among clients (`FairQueue`), and the sequences of one client by priority, then by arrival.

    When memory is short, drafters free theirs first. Then the latest sequence of the client with the most sequences is
    preempted and starts again later. The same happens when a waiting client has at least two sequences fewer.

    retain: keep the keys and values of sequences that were preempted for another client, until the memory is needed.
    """

    def __init__(
        self, cache: KVCache, drafters: DraftMemory, policy: Policy, limits: Limits, *, retain: bool = False
    ) -> None:
        self._retain = retain
        self._cache = cache
        self._drafters = drafters
        self._policy = policy
        self._limits = limits
        self.waiting: FairQueue[TokenSequence] = FairQueue()
        self.running: list[TokenSequence] = []
        self.prefix_stats = PrefixStats()
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: TokenSequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence that ended, running or waiting. Its memory is not freed."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.end(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """Free all memory of a running sequence. It waits at the front of its client's queue and will be prefilled again."""
        self._cache.drop([sequence.seq_id])
        self._put_back(sequence)

    def schedule(self, fail: Fail = _raise) -> list[ScheduledSequence]:
        """Plan the next step and reserve cache memory for it. fail: called for a sequence whose planning raised."""
        scheduled: list[ScheduledSequence] = []
        budget = self._limits.max_batch_tokens
        self._policy.begin(self.running)
        shares = self._row_shares()
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # preempted for an earlier one
            try:
                item = self._plan(sequence, self._rows_for(sequence, budget, shares))
            except Exception as error:
                fail(sequence, error)
                continue
            if item is not None:
                scheduled.append(item)
                budget -= item.num_rows
                if shares:
                    shares[sequence.client] -= item.num_rows
        scheduled = self._admit_waiting(self._still_running(scheduled), budget, fail)
        for item in scheduled:
            self.waiting.charge(item.sequence.client, item.num_rows)
        return scheduled

    def _row_shares(self) -> dict[str, int]:
        """Rows of this pass for each client. Empty if only one client has work: it may use all of them."""
        clients = {sequence.client for sequence in self.running}
        first = self._next_waiting() if self.waiting else None
        if first is None or (first.client not in clients and not self._fits(first)):
            first = None
        if len(clients | ({first.client} if first else set())) < 2:
            return {}
        demands: Counter[str] = Counter()
        for sequence in self.running:
            demands[sequence.client] += len(sequence.tokens) - self._cache.num_held(sequence.seq_id)
        if first is not None:
            demands[first.client] += len(first.tokens)
        return fair_shares(demands, self._limits.max_batch_tokens)

    def _rows_for(self, sequence: TokenSequence, budget: int, shares: dict[str, int]) -> int:
        """Rows for one sequence. Every later sequence keeps at least one row, so that none starves."""
        later = self.running[self.running.index(sequence) + 1 :]
        most = budget - len(later)
        if sequence.client in shares:
            num_reserved = sum(other.client == sequence.client for other in later)
            most = min(most, shares[sequence.client] - num_reserved)
        return max(1, most)

    def _admit_waiting(self, scheduled: list[ScheduledSequence], budget: int, fail: Fail) -> list[ScheduledSequence]:
        """Start waiting sequences. -> `scheduled`, without sequences that were preempted for them, plus the new ones"""
        while budget > 0:
            waiting = self._next_waiting()
            if waiting is None:
                break
            try:
                item = self._admit(waiting, budget)
                if item is None and self._preempt_for(waiting):
                    scheduled = self._still_running(scheduled)
                    item = self._admit(waiting, budget)
            except Exception as error:
                fail(waiting, error)
                scheduled = self._still_running(scheduled)
                continue
            if item is None:
                break
            scheduled.append(item)
            budget -= item.num_rows
        return scheduled

    def _still_running(self, scheduled: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """`scheduled` without the sequences that were preempted since."""
        running = set(self.running)
        return [item for item in scheduled if item.sequence in running]

    @property
    def _has_place(self) -> bool:
        return len(self.running) < self._limits.max_num_seqs

    def _plan(self, sequence: TokenSequence, budget: int) -> ScheduledSequence | None:
        """Schedule a running sequence and reserve its memory, preempting others if necessary. None: it had to be preempted itself."""
        item = self._cut_to(sequence, budget)
        if self._reserve(item):
            return item
        item = self._give_up_drafts(item)
        while not self._reserve(item):
            if len(self.running) == 1:
                raise RuntimeError(f"sequence {sequence.seq_id} does not fit into the cache memory, even alone")
            last = self._last_of(self._largest_client())
            self.preempt(last)
            if last is sequence:
                return None
        return item

    def _largest_client(self) -> str:
        """The client with the most running sequences; of equals, the one whose latest sequence started last."""
        counts: Counter[str] = Counter()
        for sequence in reversed(self.running):
            counts[sequence.client] += 1
        return counts.most_common(1)[0][0]

    def _last_of(self, client: str) -> TokenSequence:
        return next(self._latest_of(client))

    def _latest_of(self, client: str) -> Iterator[TokenSequence]:
        """A client's running sequences in the order of preemption: least urgent first, of equals the latest first."""
        sequences = [sequence for sequence in reversed(self.running) if sequence.client == client]
        return iter(sorted(sequences, key=lambda sequence: -sequence.priority))

    def _preempt_for(self, waiting: TokenSequence) -> bool:
        """Preempt the latest sequences of the client with the most sequences, if that makes enough room and leaves it at least as many
        as the waiting client will have. False: none was preempted."""
        largest = self._largest_client() if self.running else waiting.client
        max_preempted = self.waiting.num_started(largest) - self.waiting.num_started(waiting.client) - 1
        needed = self._bytes_to_start(waiting) - self._cache.pool.available
        preempted: list[TokenSequence] = []
        for sequence in self._latest_of(largest):
            if len(preempted) >= max_preempted or (needed <= 0 and (preempted or self._has_place)):
                break
            preempted.append(sequence)
            needed -= self._cache.bytes_of(sequence.seq_id)
        if needed > 0:
            return False
        for sequence in preempted:
            self._give_up_place(sequence)
        return bool(preempted)

    def _give_up_place(self, sequence: TokenSequence) -> None:
        """Preempt for another client, keeping the keys and values where possible."""
        if self._retain and sequence.shares_prefix:
            self._cache.retain(sequence.seq_id, sequence.tokens)
        else:
            self._cache.drop([sequence.seq_id])
        self._put_back(sequence)

    def _put_back(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self._drafters.forget([sequence.seq_id])
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _give_up_drafts(self, item: ScheduledSequence) -> ScheduledSequence:
        """Free the drafters' memory, which costs less than preempting a sequence."""
        held = self._drafters.give_up([sequence.seq_id for sequence in self.running])
        new = self._policy.cool_down(held, MEMORY_SHORT, MEMORY_COOLDOWN) if held else []
        if new:
            logger.warning(
                "cache memory is low: %s freed its share and is not used for the next %d steps",
                ", ".join(new),
                MEMORY_COOLDOWN,
            )
        return item if self._reserve(item) else replace(item, max_draft=0)

    def _admit(self, sequence: TokenSequence, budget: int) -> ScheduledSequence | None:
        """Start a waiting sequence if a place is free and its whole history fits, without preempting others."""
        seq_id, tokens = sequence.seq_id, sequence.tokens
        if not self._has_place or not self._fits(sequence):
            return None
        if not self._cache.open(seq_id, sequence.source, is_shared=sequence.shares_prefix):
            return None
        num_found = self._cache.start(seq_id, tokens) if sequence.shares_prefix else 0
        if not self._cache.reserve(seq_id, len(tokens)):
            self._cache.drop([seq_id])
            return None
        self._count(sequence, num_found)
        item = self._cut_to(sequence, budget)
        if not self._reserve(item):
            item = replace(item, max_draft=0)
        self.waiting.start(sequence)
        self.running.append(sequence)
        sequence.begin()
        return item

    def _fits(self, sequence: TokenSequence) -> bool:
        """Whether there is room for its whole history, and for its source."""
        return self._bytes_to_start(sequence) <= self._cache.pool.available

    def _bytes_to_start(self, sequence: TokenSequence) -> int:
        return self._cache.bytes_to_start(len(sequence.tokens), sequence.source, is_shared=sequence.shares_prefix)

    def _count(self, sequence: TokenSequence, num_found: int) -> None:
        """Count prefix hits, once per sequence: after a preemption it would hit its own keys and values."""
        if sequence.shares_prefix and sequence.num_preemptions == 0:
            num_source = len(sequence.source)
            sequence.num_cached = num_found + num_source - self._num_source(sequence)
            self.prefix_stats.record(num_source + len(sequence.tokens) - 1, sequence.num_cached)

    def _next_waiting(self) -> TokenSequence | None:
        """The first waiting sequence that does not wait for another to compute their common prefix."""
        return next((sequence for sequence in self.waiting if not self._waits(sequence)), None)

    def _waits(self, sequence: TokenSequence) -> bool:
        """Whether it waits for another's prefix. Only running sequences are waited for, so there are no cycles."""
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
        """Let it wait for a running sequence that is about to compute a prefix that both share."""
        tokens = sequence.tokens
        for reader in self.running:
            if reader.num_output == 0 and reader.shares_prefix and reader.source == sequence.source:
                length = common_prefix(reader.tokens, tokens, limit=len(tokens) - 1)
                if length - self._cache.num_held(reader.seq_id) < WORTH_WAITING:
                    continue
                if length - self._cache.num_shared(tokens, sequence.source) >= WORTH_WAITING:
                    sequence.wait_for, sequence.wait_len = reader, length
                    return

    def _cut_to(self, sequence: TokenSequence, num_rows: int) -> ScheduledSequence:
        # an interrupted step may have left unverified draft tokens in the cache
        tokens = sequence.tokens
        num_unread = self._cache.keep_prefix_of(sequence.seq_id, tokens, at_most=len(tokens) - 1)
        num_read, num_source = len(tokens) - num_unread, self._num_source(sequence)
        if num_unread > num_rows:
            return ScheduledSequence(sequence, num_rows, False, 0, num_read=num_read, num_source=num_source)
        draft = self._policy.draft_budget(sequence)
        can_draft = num_unread == 1 or not draft.max_draft or not self._drafters.follows_target(draft.drafter)
        return ScheduledSequence(
            sequence,
            num_unread,
            True,
            min(draft.max_draft, num_rows - num_unread) if can_draft else 0,
            draft.drafter,
            num_read,
            draft.shape,
            num_source,
        )

    def _num_source(self, sequence: TokenSequence) -> int:
        """How many tokens of its source the encoder has yet to read: all or none, since each of them attends to all others."""
        source = self._cache.source(sequence.seq_id)
        return 0 if source is None or source.is_read else source.length

    def _reserve(self, item: ScheduledSequence) -> bool:
        held = self._cache.num_held(item.sequence.seq_id)
        return self._cache.reserve(item.sequence.seq_id, held + item.num_unread + item.max_draft)
