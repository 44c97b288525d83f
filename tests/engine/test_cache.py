"""Law 3: a cache holds what a fresh pass over the same tokens gives. Its memory accounting is also consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.sampling import SamplingParams
from foredraft.utils.prefix import BLOCK, common_prefix
from tests.conftest import MakeEngine
from tests.engine.regions import holds_what_it_says, write
from tests.laws import cache_violations, holds_exactly, same

TEXT = [5, 901, 77, 300, 12, 12, 512, 4000, 8, 33, 1200, 6, 7, 9, 2, 41, 43, 47, 53, 59, 61, 67, 71]


# --- on the real target -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest, target: LanguageModel) -> LanguageModel:
    if request.param == "bfloat16":
        return target
    return load_model(EMBEDDED / "target", LoadOptions(dtype="float32", device="cpu"))


def reader(model: LanguageModel) -> KVCache:
    cache = model.new_cache(MemoryPool(1 << 30))
    cache.reserve(0, 128)
    return cache


def test_generate_forget_generate_again(model: LanguageModel) -> None:
    """The logits are the same each time, whatever was read and dropped in between."""
    cache = reader(model)
    first = model.read([Read(0, TEXT, len(TEXT))], cache)
    for kept in (len(TEXT) - 1, 16, 7, 1, 0):
        assert cache.keep_prefix_of(0, TEXT[:kept]) == 0
        model.read([Read(0, [3, 1, 4, 1, 5], 1)], cache)
        assert cache.keep_prefix_of(0, TEXT) == len(TEXT) - kept
        again = model.read([Read(0, TEXT[kept:], len(TEXT) - kept)], cache)
        assert same(again, first[kept:], exact=model.traits.row_exact)
        assert holds_exactly(model, cache, 0, TEXT)


def test_reading_in_pieces_gives_the_logits_of_a_single_pass(model: LanguageModel) -> None:
    """Chunked prefill, verification of several rows and plain decoding read the same rows."""
    whole = model.read([Read(0, TEXT, len(TEXT))], reader(model))
    for sizes in ([1] * len(TEXT), [5, 1, 3, 14], [22, 1], [16, 7]):
        cache = reader(model)
        parts, start = [], 0
        for size in sizes:
            parts.append(model.read([Read(0, TEXT[start : start + size], size)], cache))
            start += size
        assert same(torch.cat(parts), whole, exact=model.traits.row_exact)


def test_other_sequences_in_the_pass_change_no_logits(model: LanguageModel) -> None:
    alone = model.read([Read(0, TEXT, len(TEXT))], reader(model))
    cache = reader(model)
    cache.reserve(1, 64)
    cache.reserve(2, 64)
    reads = [Read(1, [8, 8, 8], 1), Read(0, TEXT, len(TEXT)), Read(2, list(range(50)), 2)]
    together = model.read(reads, cache)
    assert same(together[1:-2], alone, exact=model.traits.row_exact)


def test_a_copied_prefix_equals_a_read_one(model: LanguageModel) -> None:
    cache = reader(model)
    assert cache.start(0, TEXT) == 0
    model.read([Read(0, TEXT, 1)], cache)
    assert cache.start(1, [*TEXT[:18], 99, 98]) == 18
    assert holds_exactly(model, cache, 1, TEXT[:18])
    cache.retain(0, [*TEXT, 1])
    assert cache.start(2, [*TEXT, 55]) == len(TEXT)
    assert holds_exactly(model, cache, 2, TEXT)
    # continuing after it equals reading everything
    for seq_id, rest in ((1, [99, 98]), (2, [55, 3])):
        text = [*cache.region(seq_id).tokens, *rest]
        cache.reserve(seq_id, len(text))
        model.read([Read(seq_id, rest, 1)], cache)
        assert holds_exactly(model, cache, seq_id, text)


def test_growing_keeps_the_contents(model: LanguageModel) -> None:
    cache = reader(model)
    model.read([Read(0, TEXT, 1)], cache)
    capacity = cache.region(0).capacity
    assert cache.reserve(0, capacity + 1)
    assert cache.region(0).capacity > capacity
    assert holds_exactly(model, cache, 0, TEXT)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}], ids=str
)
def test_after_each_step_the_caches_equal_fresh_ones(
    params: dict[str, Any], make_engine: MakeEngine, target: LanguageModel, draft: LanguageModel
) -> None:
    """Invariant 1, for the target and for the draft model, with accepted and rejected drafts of every length. A hole in a draft
    model's cache changes no distribution, only the acceptance rate; this test detects it."""
    pool = MemoryPool(1 << 30)
    drafter = DraftModelDrafter(draft, target.traits.vocab_size, pool)
    engine = make_engine(drafter, pool=pool, speculative_tokens=3, seed=3)
    chosen = SamplingParams(max_tokens=12, **params).resolve({})
    sequences = [engine.add(TEXT[:n], chosen) for n in (2, 9, 17)]
    while engine.has_work:
        engine.step()
        assert cache_violations(engine, sequences) == 0
        for s in sequences:
            if not s.is_finished and s.num_output:
                held = drafter._cache.region(s.seq_id).tokens
                drafter._cache.keep_prefix_of(s.seq_id, s.tokens, at_most=len(s.tokens) - 1)
                assert len(held) >= len(s.tokens) - 2  # one token behind where all were accepted, never more
                assert holds_exactly(draft, drafter._cache, s.seq_id, s.tokens[: len(held)])
    assert engine.stats.num_accepted_tokens > 0
    assert engine.stats.num_evaluated_tokens > engine.stats.num_accepted_tokens
    engine.drop_retained()
    assert pool.used == 0


# --- regions and the pool -----------------------------------------------------------------------------------------


def text_of(name: int, length: int = 20) -> list[int]:
    """A text; those of different names differ from the first token."""
    return [100 * name + i for i in range(length)]


def retain(cache: KVCache, seq_id: int, text: Sequence[int]) -> None:
    """Start, read and end a sequence."""
    assert cache.reserve(seq_id, len(text))
    write(cache.region(seq_id), list(text))
    cache.retain(seq_id, text)


def test_a_failed_reservation_changes_nothing() -> None:
    cache = KVCache(MemoryPool(3 * 64), 1, max_len=1000)
    assert cache.reserve(0, 10)
    write(cache.region(0), [1, 2, 3])
    assert cache.reserve(1, 10)
    write(cache.region(1), text_of(1))
    cache.retain(1, text_of(1))
    held = cache.bytes_retained
    assert not cache.reserve(0, 500)
    assert holds_what_it_says(cache.region(0))
    assert (cache.num_held(0), cache.bytes_held) == (3, cache.pool.used)
    assert cache.bytes_retained == held > 0
    cache.drop([0])
    cache.drop_retained()
    assert cache.pool.used == 0


def test_the_least_recently_used_retained_region_is_evicted_first() -> None:
    cache = KVCache(MemoryPool(4 * 64), 1, max_len=64)
    for name in (1, 2, 3):
        retain(cache, name, text_of(name))
    assert cache.start(4, [*text_of(1, 18), 7, 7]) == 18  # the oldest is used: its copy takes the last free memory
    cache.drop([4])
    assert cache.reserve(5, 64)
    assert cache.reserve(6, 64)  # evicts one
    cache.drop([5, 6])
    assert [cache.num_shared([*text_of(name), 0]) for name in (1, 2, 3)] == [20, 0, 20]


def test_the_least_recently_used_region_of_all_caches_is_evicted_first() -> None:
    """Target and draft model share a pool, and evict in one common order."""
    pool = MemoryPool(4 * 64)
    target, draft = KVCache(pool, 1, max_len=64), KVCache(pool, 1, max_len=64)
    for name in (1, 2):
        retain(target, name, text_of(name))
        retain(draft, name, text_of(name))
    for seq_id, left in ((10, [0, 20, 20, 20]), (11, [0, 0, 20, 20]), (12, [0, 0, 0, 20])):
        assert target.reserve(seq_id, 1)
        assert [c.num_shared([*text_of(n), 0]) for n in (1, 2) for c in (target, draft)] == left
    assert pool.used == target.bytes_held + draft.bytes_held == pool.total


def test_a_copy_fits_where_all_memory_is_retained() -> None:
    """Also where only the region that it is copied from can be evicted."""
    for units in (2, 3, 9):
        cache = KVCache(MemoryPool(units * 64), 1, max_len=128)
        for name in range(units - 1):
            retain(cache, name, text_of(name))
        retain(cache, 90, text_of(90))
        assert cache.pool.free == 0
        assert cache.start(91, [*text_of(90, 17), 7, 8]) == 17
        assert holds_what_it_says(cache.region(91))
        assert cache.pool.used == cache.bytes_held <= cache.pool.total


def test_nothing_is_retained_twice() -> None:
    """A text that was retained already, or the beginning of one, takes no memory; a longer text replaces a shorter one."""
    cache = KVCache(MemoryPool(1 << 20), 1, max_len=1000)
    retain(cache, 0, text_of(1, 100))
    once = cache.bytes_retained
    retain(cache, 1, text_of(1, 100))
    retain(cache, 2, text_of(1, 40))
    assert cache.bytes_retained == once == cache.pool.used
    retain(cache, 3, text_of(1, 200))
    assert cache.bytes_retained == cache.bytes_for(200) == cache.pool.used
    assert cache.num_shared(text_of(1, 300)) == 200


def test_only_history_is_retained() -> None:
    cache = KVCache(MemoryPool(1 << 20), 1, max_len=1000)
    history = text_of(1, 50)
    cache.reserve(0, 60)
    write(cache.region(0), [*history[:40], 7, 7, 7, 7])  # rejected draft tokens
    cache.retain(0, history)
    assert cache.num_shared([*history[:40], 7, 7, 7, 7, 7]) == 40


def test_a_region_is_not_shared_unless_its_sequence_was_started() -> None:
    cache = KVCache(MemoryPool(1 << 20), 1, max_len=1000)
    cache.reserve(0, 64)
    write(cache.region(0), text_of(1, 50))
    assert cache.start(1, text_of(1, 60)) == 0
    write(cache.region(1), [])
    cache.drop([0])
    assert cache.num_shared(text_of(1, 60)) == 0


def test_a_reservation_that_fits_exactly_succeeds() -> None:
    """Capacity is doubled only where there is room for it."""
    cache = KVCache(MemoryPool(2 * 64), 1, max_len=10_000)
    assert cache.reserve(0, 64)
    assert cache.reserve(0, 128)
    assert cache.pool.free == 0


class CacheMachine(RuleBasedStateMachine):
    """Compares a cache with a dict of token lists. After every step its memory accounting must be consistent, and each region must hold
    what was written for exactly its tokens."""

    seq_ids = Bundle("seq_ids")

    @initialize(regions=st.integers(1, 6))
    def begin(self, regions: int) -> None:
        self.cache = KVCache(MemoryPool(regions * 64 * 3), 3, max_len=200)
        self.texts: dict[int, list[int]] = {}
        self.past: list[list[int]] = []
        self.next_id = 0

    @rule(
        target=seq_ids,
        text=st.lists(st.integers(0, 1), max_size=150),
        source=st.integers(0, 50),
        cut=st.integers(0, 200),
    )
    def start(self, text: list[int], source: int, cut: int) -> int:
        known = [*self.past, *self.texts.values()]
        wanted = [*(known[source % len(known)][:cut] if known else []), *text]
        self.next_id += 1
        offered = self.cache.num_shared(wanted)
        # of several equal matches any may be used; the match is less than a block shorter than the longest
        best = max((common_prefix(text, wanted, limit=len(wanted) - 1) for text in self.shared()), default=0)
        assert offered <= best < offered + BLOCK or best < BLOCK
        found = self.cache.start(self.next_id, wanted)
        held = self.cache.region(self.next_id).tokens
        assert found in (0, offered)
        assert len(held) == found
        assert held == wanted[:found]
        self.texts[self.next_id] = list(held)
        return self.next_id

    def shared(self) -> list[list[int]]:
        return [*self.texts.values(), *(region.tokens for region in self.cache._retained)]

    @rule(seq_id=seq_ids, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=90))
    def read(self, seq_id: int, tokens: list[int]) -> None:
        before = self.cache.pool.used, self.cache.bytes_retained
        needed = len(self.texts[seq_id]) + len(tokens)
        if self.cache.reserve(seq_id, needed):
            assert self.cache.region(seq_id).capacity >= needed
            write(self.cache.region(seq_id), tokens)
            self.texts[seq_id] += tokens
        else:
            assert (self.cache.pool.used, self.cache.bytes_retained) == before
            grown = self.cache.bytes_for(needed) - self.cache.region(seq_id).capacity * 3
            assert grown > self.cache.pool.available

    @rule(seq_id=seq_ids, kept=st.integers(0, 250), other=st.lists(st.integers(0, 1), max_size=5))
    def forget_some(self, seq_id: int, kept: int, other: list[int]) -> None:
        wanted = [*self.texts[seq_id][:kept], *other]
        common = common_prefix(self.texts[seq_id], wanted)
        assert self.cache.keep_prefix_of(seq_id, wanted) == len(wanted) - common
        self.texts[seq_id] = wanted[:common]

    @rule(seq_id=consumes(seq_ids), kept=st.integers(0, 250), more=st.lists(st.integers(0, 1), max_size=3))
    def retain(self, seq_id: int, kept: int, more: list[int]) -> None:
        history = [*self.texts.pop(seq_id)[:kept], *more]
        self.cache.retain(seq_id, history)
        self.past.append(history)

    @rule(target=seq_ids, seq_id=consumes(seq_ids))
    def drop(self, seq_id: int) -> Any:
        self.cache.drop([seq_id, seq_id])
        del self.texts[seq_id]
        return multiple()

    @rule()
    def drop_retained(self) -> None:
        self.cache.drop_retained()
        assert self.cache.bytes_retained == 0

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        assert pool.used == self.cache.bytes_held
        assert pool.used + pool.free == pool.total
        assert 0 <= pool.used <= pool.total
        assert pool.available == pool.total - self.cache.bytes_running
        retained = list(self.cache._retained)
        assert self.cache.bytes_retained == sum(region.capacity for region in retained) * 3
        assert all(holds_what_it_says(region) for region in retained)
        assert [region.used_at for region in retained] == sorted(region.used_at for region in retained)
        for seq_id, text in self.texts.items():
            assert self.cache.num_held(seq_id) == len(text)
            assert self.cache.region(seq_id).tokens == text
            assert holds_what_it_says(self.cache.region(seq_id))

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.drop(list(self.texts))
            self.cache.drop_retained()
            assert self.cache.pool.used == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
