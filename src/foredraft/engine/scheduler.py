"""Who takes part in a step, within a token budget and a memory budget."""

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
    """Fair among clients (`FairQueue`); within a client by priority, then first come first served. When memory is short the
    drafts' memory goes first; then who came last of the client with most sequences gives way, and starts again later. The
    same happens when another client waits for a place and has at least two fewer.

    retain: keep what was read for those that gave up their place, until the room is needed.
    """

    def __init__(
        self, cache: KVCache, drafters: Holder, policy: Policy, limits: Limits, *, retain: bool = False
    ) -> None:
        self._retain = retain
        self._cache = cache
        self._drafters = drafters
        self._policy = policy
        self._limits = limits
        self.waiting: FairQueue[TokenSequence] = FairQueue()
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
            self.waiting.end(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """Give up all that is held for a running sequence; it waits at the front and will read its history again."""
        self._cache.drop([sequence.seq_id])
        self._put_back(sequence)

    def schedule(self, fail: Fail = _raise) -> list[ScheduledSequence]:
        """fail: ends one sequence, for which no work could be planned; it removes it."""
        scheduled: list[ScheduledSequence] = []
        budget = self._limits.max_batch_tokens
        self._policy.begin(self.running)
        shares = self._row_shares()
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # gave way to one before it
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
        """Rows of this pass that each client may have. Empty where one client alone has work: it may have all."""
        clients = {sequence.client for sequence in self.running}
        first = self._next_waiting() if self.waiting else None
        if first is None or (first.client not in clients and not self._cache.fits(len(first.tokens))):
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
        """Everyone behind gets a row at least, so that nobody starves."""
        behind = self.running[self.running.index(sequence) + 1 :]
        most = budget - len(behind)
        if sequence.client in shares:
            num_own = sum(other.client == sequence.client for other in behind)
            most = min(most, shares[sequence.client] - num_own)
        return max(1, most)

    def _admit_waiting(self, scheduled: list[ScheduledSequence], budget: int, fail: Fail) -> list[ScheduledSequence]:
        """-> works, without those who gave way, and the works of those who begin"""
        while budget > 0:
            waiting = self._next_waiting()
            if waiting is None:
                break
            try:
                item = self._admit(waiting, budget)
                if item is None and self._make_way_for(waiting):
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
        """Without those whose sequence gave way after its work was planned."""
        running = set(self.running)
        return [item for item in scheduled if item.sequence in running]

    @property
    def _has_place(self) -> bool:
        return len(self.running) < self._limits.max_num_seqs

    def _plan(self, sequence: TokenSequence, budget: int) -> ScheduledSequence | None:
        """The work of a running sequence, its memory reserved; others give way for it. None: it gave way itself."""
        item = self._cut_to(sequence, budget)
        if self._reserve(item):
            return item
        item = self._give_up_drafts(item)
        while not self._reserve(item):
            if len(self.running) == 1:
                raise RuntimeError(f"sequence {sequence.seq_id} does not fit into the cache memory alone")
            last = self._last_of(self._largest_client())
            self.preempt(last)
            if last is sequence:
                return None
        return item

    def _largest_client(self) -> str:
        """Of clients with as many running sequences, the one whose last one came last."""
        counts: Counter[str] = Counter()
        for sequence in reversed(self.running):
            counts[sequence.client] += 1
        return counts.most_common(1)[0][0]

    def _last_of(self, client: str) -> TokenSequence:
        return next(self._latest_of(client))

    def _latest_of(self, client: str) -> Iterator[TokenSequence]:
        """A client's running sequences in the order in which they give way: the least urgent first, then who came last."""
        own = [sequence for sequence in reversed(self.running) if sequence.client == client]
        return iter(sorted(own, key=lambda sequence: -sequence.priority))

    def _make_way_for(self, waiting: TokenSequence) -> bool:
        """The client with most running sequences gives up its last ones if that makes room, and if it has still more than
        the other then. False: nobody gave way."""
        largest = self._largest_client() if self.running else waiting.client
        may_go = self.waiting.num_started(largest) - self.waiting.num_started(waiting.client) - 1
        needed = self._cache.bytes_for(len(waiting.tokens)) - self._cache.pool.available
        gone: list[TokenSequence] = []
        for sequence in self._latest_of(largest):
            if len(gone) >= may_go or (needed <= 0 and (gone or self._has_place)):
                break
            gone.append(sequence)
            needed -= self._cache.region(sequence.seq_id).capacity * self._cache.bytes_per_token
        if needed > 0:
            return False
        for sequence in gone:
            self._give_up_place(sequence)
        return bool(gone)

    def _give_up_place(self, sequence: TokenSequence) -> None:
        if self._retain and sequence.shares_prefix:
            self._cache.retain(sequence.seq_id, sequence.tokens)
        else:
            self._cache.drop([sequence.seq_id])
        self._put_back(sequence)

    def _put_back(self, sequence: TokenSequence) -> None:
        self.running.remove(sequence)
        self._drafters.forget([sequence.seq_id])
        sequence.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _give_up_drafts(self, item: ScheduledSequence) -> ScheduledSequence:
        """A draft is worth less than a sequence that would have to start again: its memory goes first."""
        held = self._drafters.give_up([sequence.seq_id for sequence in self.running])
        new = self._policy.cool_down(held, MEMORY_SHORT, MEMORY_COOLDOWN) if held else []
        if new:
            logger.warning("cache memory is short: %s gave up its own for %d steps", ", ".join(new), MEMORY_COOLDOWN)
        return item if self._reserve(item) else replace(item, max_draft=0)

    def _admit(self, sequence: TokenSequence, budget: int) -> ScheduledSequence | None:
        """Start a waiting sequence if there is a place and its whole history fits; nobody gives way for it."""
        seq_id, tokens = sequence.seq_id, sequence.tokens
        if not self._has_place or not self._cache.fits(len(tokens)):
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

    def _cut_to(self, sequence: TokenSequence, num_rows: int) -> ScheduledSequence:
        # a step that was interrupted may have left draft tokens behind that nobody verified
        tokens = sequence.tokens
        num_unread = self._cache.keep_prefix_of(sequence.seq_id, tokens, at_most=len(tokens) - 1)
        num_read = len(tokens) - num_unread
        if num_unread > num_rows:
            return ScheduledSequence(sequence, num_rows, False, 0, num_read=num_read)
        draft = self._policy.draft_budget(sequence)
        return ScheduledSequence(
            sequence, num_unread, True, min(draft.max_draft, num_rows - num_unread), draft.drafter, num_read
        )

    def _reserve(self, item: ScheduledSequence) -> bool:
        held = self._cache.num_held(item.sequence.seq_id)
        return self._cache.reserve(item.sequence.seq_id, held + item.num_unread + item.max_draft)
