"""The scheduler keeps within its budgets, serves first come first served, and starves no sequence. There is no model: a step only
marks tokens as computed in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.scheduler import Limits, ScheduledSequence, Scheduler
from foredraft.engine.sequence import TokenSequence
from foredraft.policy import DraftBudget, FixedPolicy
from tests.laws import sampler_for

UNIT = 64
"""The capacities of regions are multiples of this many tokens; a token takes one byte of target cache here."""


class HoldingDrafter:
    """Takes one unit of the pool for every sequence that it drafts for, while the pool has free units."""

    def __init__(self, pool: MemoryPool, size: int = 0) -> None:
        self.pool = pool
        self.size = size
        self.held: set[int] = set()
        self.forgotten: list[int] = []
        self.reads_target = False

    def follows_target(self, name: str) -> bool:
        return self.reads_target

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        raise NotImplementedError

    def draft_budget(self, seq_id: int) -> bool:
        if seq_id not in self.held and self.size and self.pool.take(self.size):
            self.held.add(seq_id)
        return not self.size or seq_id in self.held

    def give_up(self, seq_ids: list[int]) -> list[str]:
        held = ["holding"] if self.held else []
        self.forget(seq_ids)
        return held

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten += seq_ids
        for seq_id in seq_ids:
            if seq_id in self.held:
                self.held.remove(seq_id)
                self.pool.give(self.size)


class World:
    """A scheduler with its cache and drafter, and steps that do what the engine does."""

    def __init__(self, units: int = 1000, *, seqs: int = 64, rows: int = 512, draft_bytes: int = 0) -> None:
        self.pool = MemoryPool(units * UNIT)
        self.cache = KVCache(self.pool, 1, max_len=100_000)
        self.drafter = HoldingDrafter(self.pool, draft_bytes)
        self.limits = Limits(seqs, rows)
        self.scheduler = Scheduler(self.cache, self.drafter, FixedPolicy("holding"), self.limits)
        self.finished: list[int] = []
        self.next_id = 0

    def add(
        self,
        prompt_len: int,
        max_tokens: int,
        *,
        gamma: int = 0,
        wait_for: TokenSequence | None = None,
        first: int = 0,
        client: str = "",
        priority: int = 0,
    ) -> TokenSequence:
        prompt = [first, *range(1, prompt_len)]
        sequence = TokenSequence(
            self.next_id,
            prompt,
            sampler_for({}, prompt=prompt),
            prompt_len + max_tokens,
            gamma,
            wait_for=wait_for,
            client=client,
            priority=priority,
        )
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def add_text(self, prompt: list[int], max_tokens: int = 5, **settings: object) -> TokenSequence:
        sampler = sampler_for(settings, prompt=prompt)
        sequence = TokenSequence(self.next_id, prompt, sampler, len(prompt) + max_tokens, 0)
        self.next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[ScheduledSequence]:
        scheduled = self.scheduler.schedule()
        self.check(scheduled)
        for item in scheduled:
            sequence, region = item.sequence, self.cache.region(item.sequence.seq_id)
            drafted = item.max_draft if item.scores and self.drafter.draft_budget(sequence.seq_id) else 0
            held = len(region.tokens)
            assert region.capacity >= held + item.num_unread + item.max_draft
            region.tokens += [*sequence.tokens[held : held + item.num_unread], *[-1] * drafted]
            if not item.scores:
                assert len(region.tokens) < len(sequence.tokens)
                continue
            assert held + item.num_unread == len(sequence.tokens)
            new_ids = [-1] * (drafted // 2) + [1000 + len(sequence.tokens)]
            sequence.commit(new_ids, drafted)
            self.cache.keep_prefix_of(sequence.seq_id, sequence.tokens, at_most=len(sequence.tokens) - 1)
            if sequence.is_finished:
                self.end(sequence)
        return scheduled

    def end(self, sequence: TokenSequence) -> None:
        self.finished.append(sequence.seq_id)
        self.scheduler.remove(sequence)
        self.drafter.forget([sequence.seq_id])
        self.cache.drop([sequence.seq_id])

    def check(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Assert the invariants of a schedule."""
        ids = [item.sequence.seq_id for item in scheduled]
        running = [sequence.seq_id for sequence in self.scheduler.running]
        assert len(set(ids)) == len(ids)
        assert sum(item.num_unread + item.max_draft for item in scheduled) <= self.limits.max_batch_tokens
        assert len(running) <= self.limits.max_num_seqs
        assert sorted(ids) == sorted(running), "everyone who runs gets a part in every step"
        assert self.pool.used == self.cache.bytes_held + self.drafter.size * len(self.drafter.held) <= self.pool.total
        for item in scheduled:
            assert item.num_unread >= 1
            assert item.max_draft >= 0
            assert item.scores or item.max_draft == 0
            assert item.max_draft <= item.sequence.speculative_tokens
        for sequence in self.scheduler.waiting:
            assert self.cache.num_held(sequence.seq_id) == 0
            assert sequence.seq_id not in running

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            assert self.step(), "a step with nothing in it would never end"
        assert not self.scheduler.has_work
        assert self.pool.used == 0
        assert not self.drafter.held


# --- budgets ------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_read_in_pieces() -> None:
    world = World(rows=10)
    world.add(25, 2)
    scheduled = [world.step()[0] for _ in range(3)]
    assert [(w.num_unread, w.scores) for w in scheduled] == [(10, False), (10, False), (5, True)]


def test_draft_tokens_count_against_the_budget() -> None:
    world = World(rows=8)
    world.add(5, 50, gamma=16)
    (item,) = world.step()
    assert (item.num_unread, item.max_draft) == (5, 3)


def test_a_drafter_that_reads_the_target_is_not_asked_before_the_target_has_read_the_text() -> None:
    world = World()
    world.drafter.reads_target = True
    sequence = world.add(5, 50, gamma=4)
    assert [(item.num_unread, item.max_draft) for item in world.step()] == [(5, 0)]
    assert [(item.num_unread, item.max_draft) for item in world.step()] == [(1, 4)]
    world.scheduler.preempt(sequence)
    assert [item.max_draft for item in world.step()] == [0]
    assert [item.max_draft for item in world.step()] == [4]


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    world = World(rows=10)
    first = world.add(3, 50)
    world.step()
    long = world.add(200, 5)
    for n in range(20):
        scheduled = world.step()
        assert {w.sequence.seq_id for w in scheduled} == {first.seq_id, long.seq_id}
        assert first.num_output == n + 2


def test_a_long_prompt_leaves_a_row_for_every_later_sequence() -> None:
    world = World(rows=6)
    world.add(100, 5)
    world.step()
    assert world.scheduler.running[0].num_output == 0
    shorts = [world.add(1, 3) for _ in range(3)]
    for short in shorts:  # as after all were preempted and restarted
        world.scheduler.waiting.start(short)
        world.scheduler.running.append(short)
    scheduled = world.step()
    assert [w.num_unread for w in scheduled] == [3, 1, 1, 1]


def test_no_more_sequences_than_allowed_run() -> None:
    world = World(seqs=2)
    for _ in range(5):
        world.add(3, 4)
    world.run()
    assert world.finished == [0, 1, 2, 3, 4]


def test_first_come_first_served() -> None:
    """A sequence that fits does not overtake one that does not fit yet."""
    world = World(units=4)
    world.add(100, 60)
    world.step()
    big, small = world.add(190, 20), world.add(3, 3)
    world.step()
    assert list(world.scheduler.waiting) == [big, small]
    world.run()


# --- memory -------------------------------------------------------------------------------------------------------


def test_the_latest_sequence_is_preempted() -> None:
    world = World(units=3)
    sequences = [world.add(60, 60, first=i) for i in range(3)]
    world.step()
    assert world.scheduler.running == sequences
    while not world.scheduler.waiting:
        world.step()
    gave_way = [s.num_preemptions for s in sequences]
    assert gave_way == sorted(gave_way)
    assert gave_way[0] == 0
    assert gave_way[-1] == 1
    assert list(world.scheduler.waiting) == [s for s in sequences if s.num_preemptions]
    world.run()
    assert world.finished[0] == 0
    assert sorted(world.finished) == [0, 1, 2]
    assert all(len(s.tokens) == 120 for s in sequences)


def test_a_preempted_sequence_waits_before_later_ones() -> None:
    world = World(units=3, seqs=3)
    sequences = [world.add(60, 60, first=i) for i in range(3)]
    late = world.add(3, 3, first=9)
    while not any(s.num_preemptions for s in sequences):
        world.step()
    waiting = list(world.scheduler.waiting)
    assert waiting[-1] is late
    assert waiting[:-1] == [s for s in sequences if s.num_preemptions]
    world.run()


def test_a_drafter_that_freed_its_memory_is_logged_once_and_cools_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(units=4, draft_bytes=UNIT)
    for first in range(2):
        world.add(60, 60, gamma=2, first=first)
    world.run()
    assert sorted(world.finished) == [0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "cache memory is low: holding freed its share and is not used for the next 32 steps"
    ]


def test_preemption_frees_all_memory_drafts_included() -> None:
    world = World(draft_bytes=UNIT)
    sequence = world.add(10, 20, gamma=2)
    world.step()
    world.step()
    assert world.drafter.held == {0}
    text = list(sequence.tokens)
    world.scheduler.preempt(sequence)
    assert world.pool.used == 0
    assert (sequence.tokens, sequence.num_preemptions) == (text, 1)
    assert world.scheduler.num_preemptions == 1
    assert list(world.scheduler.waiting) == [sequence]
    (item,) = world.step()
    assert item.num_unread == len(text)  # it reads its history again
    world.run()


def test_a_drafter_frees_its_memory_before_a_sequence_fails() -> None:
    """One sequence, and a pool that fits its longest text: the drafter must free its memory, however many tokens it is asked for in the
    step that needs that memory."""
    for gamma in (1, 2, 3, 4, 7):
        for max_tokens in range(1, 20):
            world = World(units=2, draft_bytes=UNIT)
            world.add(60, max_tokens, gamma=gamma)
            world.run()


def test_a_drafter_that_is_turned_off_frees_its_memory_too() -> None:
    """The policy may turn a drafter off at any step; its memory for the sequence stays until `forget`."""

    class Off(FixedPolicy):
        calls = 0

        def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
            self.calls += 1
            return DraftBudget("holding", 2 if self.calls == 1 else 0)

    world = World(units=2, draft_bytes=UNIT)
    world.scheduler = Scheduler(world.cache, world.drafter, Off("holding"), world.limits)
    world.add(60, 20, gamma=4)
    world.run()


def test_drafters_free_their_memory_before_a_sequence_is_preempted() -> None:
    """Two sequences and their drafts fill the pool. Then the drafts' memory is freed, and both continue."""
    world = World(units=4, draft_bytes=UNIT)
    sequences = [world.add(50, 40, gamma=2) for _ in range(2)]
    world.run()
    assert set(world.drafter.forgotten) >= {s.seq_id for s in sequences}
    assert [s.num_preemptions for s in sequences] == [0, 0]


def test_a_sequence_that_can_never_fit_is_an_error_not_an_endless_loop() -> None:
    world = World(units=1)
    world.add(60, 60)
    with pytest.raises(RuntimeError, match="does not fit"):
        world.run()


arrivals = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=8
)


@given(
    arrivals=arrivals,
    units=st.integers(3, 8),
    seqs=st.integers(1, 6),
    rows=st.integers(1, 40),
    draft_bytes=st.sampled_from([0, UNIT // 2, UNIT]),
)
@settings(max_examples=250, deadline=None)
def test_every_sequence_finishes_within_every_budget(
    arrivals: list[tuple[int, int, int, int]], units: int, seqs: int, rows: int, draft_bytes: int
) -> None:
    world = World(units, seqs=seqs, rows=rows, draft_bytes=draft_bytes)
    sequences = []
    for i, (prompt_len, max_tokens, gamma, gap) in enumerate(arrivals):
        sequences.append(world.add(prompt_len, max_tokens, gamma=gamma, first=i))
        for _ in range(gap):
            world.step()
    world.run()
    assert all(s.num_output == max_tokens for s, (_, max_tokens, _, _) in zip(sequences, arrivals, strict=True))


# --- siblings -----------------------------------------------------------------------------------------------------


def test_siblings_wait_for_the_first_to_read_their_prompt_and_share_it() -> None:
    world = World(rows=20)
    first = world.add(50, 10)
    siblings = [world.add(50, 10, wait_for=first) for _ in range(2)]
    other = world.add(5, 10, first=77)
    for _ in range(3):
        scheduled = world.step()
        assert not {s.seq_id for s in siblings} & {w.sequence.seq_id for w in scheduled}
    assert first.num_output > 0
    scheduled = world.step()
    parts = {w.sequence.seq_id: w.num_unread for w in scheduled}
    assert [parts[s.seq_id] for s in siblings] == [1, 1]  # everything but the pending token was copied
    assert other.num_output > 0  # the other does not wait
    world.run()


def test_a_sequence_waits_for_a_prefix_that_another_computes_but_no_longer() -> None:
    for rows in (40, 150, 1000):
        world = World(rows=rows)
        first = world.add_text([*range(100), *range(500, 600)])
        second, other = world.add_text([*range(100), *range(700, 710)]), world.add_text([9, 9, 9])
        parts: dict[int, ScheduledSequence] = {}
        while second.seq_id not in parts:
            held = world.cache.num_held(first.seq_id)
            parts = {w.sequence.seq_id: w for w in world.step()}
        assert held >= 100
        assert parts[second.seq_id].num_unread == 10
        assert second.num_cached == 100
        if rows == 1000:
            assert other.num_output > 1  # the other does not wait
        world.run()


def test_no_sequence_waits_for_a_cached_or_short_prefix_or_without_prefix_caching() -> None:
    for common, wants_to, held_already in ((63, True, False), (200, True, True), (200, False, False)):
        world = World(rows=1000)
        if held_already:
            world.add_text([*range(common), 1]).max_len = 1000
            world.step()
        first = world.add_text([*range(common), *range(700, 790)], prefix_caching=wants_to)
        second = world.add_text([*range(common), *range(800, 890)], prefix_caching=wants_to)
        scheduled = {w.sequence.seq_id: w.num_unread for w in world.step()}
        assert {first.seq_id, second.seq_id} <= set(scheduled)
        assert (scheduled[second.seq_id] == 90) == held_already


def test_a_sequence_continues_if_the_one_it_waits_for_ends_or_is_preempted() -> None:
    for ends in (True, False):
        world = World()
        first = world.add_text(list(range(200)))
        second = world.add_text([*range(190), 7])
        world.scheduler.schedule()  # a step that is interrupted before anything is read
        assert second.wait_for is first
        if ends:
            first.finish("abort")
            world.end(first)
        else:
            world.scheduler.preempt(first)
        world.run()
        assert second.num_output > 0


def test_prefix_hits_are_counted_once() -> None:
    world = World(rows=1000)
    world.add_text(list(range(100)))
    second = world.add_text([*range(80), 7, 8])
    private = world.add_text(list(range(100)), prefix_caching=False)
    logged = world.add_text(list(range(100)), prompt_logprobs=0)
    while not second.num_output:
        world.step()
    world.scheduler.preempt(second)
    world.run()
    stats = world.scheduler.prefix_stats
    assert (stats.num_asked_tokens, stats.num_found_tokens) == (99 + 81, 80)
    assert [s.num_cached for s in (second, private, logged)] == [80, 0, 0]


def test_siblings_of_an_aborted_sequence_continue() -> None:
    world = World()
    first = world.add(10, 5)
    sibling = world.add(10, 5, wait_for=first)
    first.finish("abort")
    world.scheduler.remove(first)
    world.cache.drop([first.seq_id])
    world.run()
    assert sibling.num_output == 5


def test_a_sibling_of_a_preempted_sequence_continues() -> None:
    world = World(units=3)
    old = world.add(100, 40)
    world.step()
    first = world.add(60, 40, first=5)
    sibling = world.add(60, 40, wait_for=first, first=5)
    world.run()
    assert [s.num_output for s in (old, first, sibling)] == [40, 40, 40]


def test_running_and_waiting_sequences_can_be_removed_even_twice() -> None:
    world = World()
    running, waiting = world.add(3, 5), world.add(3, 5)
    world.scheduler.remove(waiting)
    world.step()
    world.scheduler.remove(running)
    world.scheduler.remove(running)
    assert not world.scheduler.has_work


# --- fairness among clients ---------------------------------------------------------------------------------------


def flood(world: World, count: int, *, prompt_len: int = 3, max_tokens: int = 50) -> list[TokenSequence]:
    return [world.add(prompt_len, max_tokens, client="flood", first=1000 + i) for i in range(count)]


def test_a_flood_does_not_hold_all_places_while_another_client_waits() -> None:
    world = World(seqs=8)
    flood(world, 30)
    for _ in range(5):
        world.step()
    small = [world.add(3, 4, client=f"small-{i}") for i in range(3)]
    world.step()
    assert all(s.num_output == 1 for s in small)
    assert world.scheduler.waiting.num_started("flood") == 5
    world.run()


def test_two_flooding_clients_get_equally_many_places() -> None:
    world = World(seqs=8)
    flood(world, 30)
    world.step()
    for i in range(30):
        world.add(3, 50, client="other", first=2000 + i)
    world.step()
    assert [world.scheduler.waiting.num_started(client) for client in ("flood", "other")] == [4, 4]
    preempted = sum(s.num_preemptions for s in world.scheduler.waiting)
    for _ in range(20):
        world.step()
    assert sum(s.num_preemptions for s in world.scheduler.waiting) == preempted, "none is preempted twice"
    world.run()


def test_the_only_client_gets_all_places() -> None:
    world = World(seqs=8)
    small = world.add(3, 2, client="small")
    flood(world, 30)
    while not small.is_finished:
        world.step()
    world.step()
    assert world.scheduler.waiting.num_started("flood") == 8
    world.run()


def test_a_flooding_client_is_preempted_for_memory_that_another_waits_for() -> None:
    world = World(units=6)
    sequences = flood(world, 6, max_tokens=40)
    world.step()
    assert world.pool.free == 0
    small = world.add(3, 4, client="small")
    world.step()
    assert small.num_output == 1
    assert [s.num_preemptions for s in sequences] == [0, 0, 0, 0, 0, 1]
    world.run()


def test_no_sequence_is_preempted_for_one_that_would_still_not_fit() -> None:
    world = World(units=6)
    held = world.add(100, 20, client="big")
    sequences = flood(world, 4, max_tokens=40)
    world.step()
    big = world.add(300, 5, client="big")
    world.step()
    assert [s.num_preemptions for s in (held, *sequences, big)] == [0] * 6
    world.run()


def test_a_long_prompt_of_one_client_leaves_rows_for_the_prompts_of_another() -> None:
    world = World(rows=40)
    world.add(1000, 5, client="long")
    world.step()
    other = world.add(15, 5, client="other", first=9)
    scheduled = {w.sequence.client: w.num_unread for w in world.step()}
    assert scheduled == {"long": 25, "other": 15}
    second = world.add(500, 5, client="other", first=10)
    world.step()
    scheduled = {w.sequence.seq_id: w.num_unread for w in world.step()}
    assert scheduled[second.seq_id] == 19
    assert other.num_output == 3
    world.run()


def test_drafts_of_one_client_leave_rows_for_the_prompts_of_another() -> None:
    world = World(rows=40)
    world.add(3, 200, gamma=100, client="long")
    world.step()
    other = world.add(15, 5, client="other", first=9)
    world.step()
    assert other.num_output == 1
    world.run()


def test_a_client_that_was_served_less_goes_first() -> None:
    world = World(seqs=2)
    for client in "ab":
        world.add(3, 20, client=client)
    later = [world.add(3, 20, client="a", first=i) for i in range(3)]
    last = world.add(3, 20, client="b", first=9)
    while last.num_output == 0:
        world.step()
    assert sum(s.num_output > 0 for s in later) <= 1
    world.run()


def test_priority_only_orders_requests_of_the_same_client() -> None:
    world = World(seqs=1)
    world.add(3, 5, client="a")
    world.step()
    late, early = world.add(3, 5, client="a", priority=3), world.add(3, 5, client="a", priority=-1)
    other = world.add(3, 5, client="b", priority=100)
    world.run()
    assert world.finished.index(other.seq_id) == 1
    assert world.finished.index(early.seq_id) < world.finished.index(late.seq_id)


def test_the_least_urgent_is_preempted_first() -> None:
    world = World(units=3)
    urgent, other, last = (world.add(60, 60, first=i, priority=p) for i, p in enumerate((0, 5, 0)))
    world.run()
    assert (urgent.num_preemptions, last.num_preemptions) == (0, 1)
    assert other.num_preemptions >= 1


@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c"]),
            st.integers(1, 150),
            st.integers(1, 40),
            st.integers(0, 5),
            st.integers(0, 6),
            st.integers(-1, 1),
        ),
        min_size=1,
        max_size=10,
    ),
    units=st.integers(3, 8),
    seqs=st.integers(1, 6),
    rows=st.integers(6, 40),
    draft_bytes=st.sampled_from([0, UNIT // 2, UNIT]),
)
@settings(max_examples=250, deadline=None)
def test_every_sequence_of_every_client_finishes(
    arrivals: list[tuple[str, int, int, int, int, int]], units: int, seqs: int, rows: int, draft_bytes: int
) -> None:
    world = World(units, seqs=seqs, rows=rows, draft_bytes=draft_bytes)
    sequences = []
    for i, (client, prompt_len, max_tokens, gamma, gap, priority) in enumerate(arrivals):
        sequences.append(world.add(prompt_len, max_tokens, gamma=gamma, first=i, client=client, priority=priority))
        for _ in range(gap):
            world.step()
    world.run()
    assert all(s.num_output == one[2] for s, one in zip(sequences, arrivals, strict=True))
