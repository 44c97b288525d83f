"""The prefix index, compared with an exhaustive search; and laws 2 and 3 for texts that share cached prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.drafters import REGISTRY, DraftModelDrafter, ScriptedDrafter
from foredraft.engine.cache import KVCache
from foredraft.engine.engine import Engine
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.stats import PrefixStats
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.sampling import SamplingParams
from foredraft.utils.prefix import BLOCK, PrefixIndex, common_prefix
from tests.conftest import MakeEngine, embedded
from tests.laws import cache_violations, holds_exactly
from tests.methods import all_methods
from tests.model.zoo import SPECIES, saved

# --- the index ----------------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 1), max_size=5).flatmap(
    lambda head: st.integers(0, BLOCK - 1).map(lambda tail: [t for bit in head for t in [bit] * BLOCK] + [7] * tail)
)
"""Texts of few different blocks, so that they share some, and a tail shorter than a block."""


def num_blocks(text: list[int], other: list[int]) -> int:
    return common_prefix(text, other) // BLOCK


@given(steps=st.lists(st.tuples(st.booleans(), texts), max_size=30), wanted=texts)
def test_the_item_with_most_common_blocks_is_found_and_no_redundant_one_is_kept(
    steps: list[tuple[bool, list[int]]], wanted: list[int]
) -> None:
    index, held = PrefixIndex[int](), dict[int, list[int]]()
    for name, (is_added, text) in enumerate(steps):
        if not is_added and held:
            oldest = next(iter(held))
            index.remove(held.pop(oldest))
            continue
        displaced = index.add(text, name)
        held[name] = text
        if displaced is not None:
            gone = held.pop(displaced)
            rest = len(gone) // BLOCK
            assert rest == 0 or any(num_blocks(gone, other) == rest for other in held.values())
    for name, text in held.items():
        others = [other for key, other in held.items() if key != name]
        assert all(num_blocks(text, other) < len(text) // BLOCK for other in others), "no item is a prefix of another"
    found = index.find(wanted)
    most = max((num_blocks(text, wanted) for text in held.values()), default=0)
    assert (found is None) == (most == 0)
    assert found is None or num_blocks(held[found], wanted) == most


def test_an_emptied_index_finds_nothing() -> None:
    index = PrefixIndex[str]()
    text = list(range(10 * BLOCK))
    assert index.add(text, "a") is None
    index.remove(text)
    assert index.find(text) is None
    assert index.add(text[: 2 * BLOCK], "b") is None
    assert index.find(text) == "b"


def test_texts_shorter_than_a_block_are_not_kept() -> None:
    index = PrefixIndex[str]()
    assert index.add([1] * (BLOCK - 1), "a") == "a"
    assert index.find([1] * BLOCK) is None


# --- law 2: no text depends on which prefixes were cached ----------------------------------------------------

SYSTEM = [0, *range(600, 720)]
TAILS = ([549, 300, 11, 12], [616, 635], [549, 300, 9], [*range(500, 540)], [549, 300, 11, 12], [9])
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2},
)
PlainText = Callable[..., list[int]]


def params(max_tokens: int = 16, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings).resolve({})


def run(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work


def assert_books_balance(engine: Engine) -> None:
    """Assert invariant 5 for an idle engine."""
    assert engine.pool.used == engine.pool.bytes_retained
    assert engine.pool.available == engine.pool.total
    engine.drop_retained()
    assert engine.pool.used == 0


@pytest.fixture(scope="module")
def plain(make_engine: MakeEngine) -> PlainText:
    """The text of a request alone, without drafts, its prompt read in one pass."""
    known: dict[str, list[int]] = {}

    def text(prompt: Sequence[int], wanted: SamplingParams, child: int = 0) -> list[int]:
        key = f"{prompt}{wanted}{child}"
        if key not in known:
            engine = make_engine("none", retain=False)
            sequence = engine.add(prompt, wanted, child=child)
            run(engine)
            known[key] = sequence.output_ids
        return known[key]

    return text


@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("method", all_methods(REGISTRY))
def test_texts_that_share_a_beginning_are_plain_decodings(
    make_engine: MakeEngine, plain: PlainText, method: str, rows: int
) -> None:
    """Requests run at the same time, later, and after all others have ended; one is preempted and one is aborted."""
    engine = make_engine(method, limits=Limits(max_batch_tokens=rows), end_ids=[0], seed=0)
    asked: list[tuple[list[int], SamplingParams, TokenSequence]] = []

    def ask(tail: Sequence[int], way: dict[str, Any]) -> None:
        prompt, wanted = [*SYSTEM, *tail], params(**way)
        asked.append((prompt, wanted, engine.add(prompt, wanted)))

    for i, tail in enumerate(TAILS):
        ask(tail, WAYS[i % len(WAYS)])
    for step in range(14):
        engine.step()
        if step == 5:
            engine.abort(asked[1][2])
        if step == 8 and not asked[0][2].is_finished:
            engine.preempt(asked[0][2])
        assert cache_violations(engine, [sequence for _, _, sequence in asked]) == 0
    for way in WAYS:
        ask(TAILS[0], way)
    run(engine)
    for way in WAYS:
        ask(TAILS[3], way)
    prompt, wanted, first = asked[0]
    follow_up = [*first.tokens, *TAILS[1]]
    asked.append((follow_up, wanted, engine.add(follow_up, wanted)))
    run(engine)
    for prompt, wanted, sequence in asked:
        if sequence.finish_reason != "abort":
            # only this engine has end_ids: plain decoding continued after the end
            assert sequence.output_ids == plain(prompt, wanted)[: sequence.num_output]
            assert sequence.num_output == 16 or sequence.output_ids[-1] == 0
    assert asked[-1][2].num_cached == len(first.tokens) - 1
    assert engine.prefix_stats.num_found_tokens > 8 * len(SYSTEM)
    if method in ("draft_model", "self-int8", "self-int4"):
        assert engine.draft_prefix_stats.num_found_tokens > 8 * len(SYSTEM)
    assert_books_balance(engine)


@pytest.mark.parametrize("units", [8, 11, 20])
def test_sharing_with_scarce_memory_changes_no_text(
    make_engine: MakeEngine, target: LanguageModel, plain: PlainText, units: int
) -> None:
    room = target.traits.bytes_per_token * 64 * units
    engine = make_engine("draft_model", cache_memory=room, limits=Limits(max_batch_tokens=100), seed=0)
    wanted = params(40, temperature=0.9, seed=6)
    for _ in range(2):
        prompts = [[*SYSTEM, *tail] for tail in TAILS]
        sequences = [engine.add(prompt, wanted) for prompt in prompts]
        run(engine)
        assert [s.output_ids for s in sequences] == [plain(prompt, wanted) for prompt in prompts]
    assert_books_balance(engine)


def test_texts_that_share_a_beginning_are_plain_decodings_in_float32_up_to_near_ties(
    draft: LanguageModel, make_engine: MakeEngine
) -> None:
    """Rows are not bit-exact in float32: texts are the same up to near ties, which are counted."""
    model = embedded("target", dtype="float32")
    engine, wanted = make_engine("draft_model", model=model, seed=0), params(**WAYS[0])
    for tail in TAILS[:3]:
        alone = make_engine("none", model=model, retain=False)
        prompt = [*SYSTEM, *tail]
        expected, sequence = alone.add(prompt, wanted), engine.add(prompt, wanted)
        run(alone)
        run(engine)
        assert sequence.output_ids == expected.output_ids or sequence.stats.num_near_ties > 0
    assert engine.prefix_stats.num_found_tokens >= 2 * len(SYSTEM)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_keys_outside_a_sliding_window_are_shared_like_others(
    name: str, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """A window hides keys, but they stay in the cache."""
    model = load_model(saved(SPECIES[name].config(), tmp_path, 0), LoadOptions(dtype="bfloat16", device="cpu"))
    system = [1 + i % 90 for i in range(60)]
    engine, wanted = make_engine("suffix", model=model, seed=0), params(**WAYS[1])
    for tail in ([3], [4, 5, 6], [7, 8]):
        alone = make_engine("none", model=model, retain=False)
        expected, sequence = alone.add([*system, *tail], wanted), engine.add([*system, *tail], wanted)
        run(alone)
        run(engine)
        assert sequence.output_ids == expected.output_ids
    assert engine.prefix_stats.num_found_tokens >= 2 * len(system)


# --- who shares -----------------------------------------------------------------------------------------------------


def test_without_prefix_caching_a_request_shares_nothing(make_engine: MakeEngine) -> None:
    """It neither uses nor leaves cached prefixes, also while it runs, in target and draft model."""
    engine = make_engine("draft_model", seed=0)
    prompt = [*SYSTEM, 5]
    private, open_to_all = params(**WAYS[0], prefix_caching=False), params(**WAYS[0])
    alone = engine.add(prompt, private)
    engine.step()
    beside = engine.add(prompt, open_to_all)
    run(engine)
    assert (alone.num_cached, beside.num_cached) == (0, 0)
    held = engine.pool.used
    assert engine.pool.used == engine.pool.bytes_retained > 0
    before = engine.prefix_stats + PrefixStats(), engine.draft_prefix_stats
    again = engine.add(prompt, private)
    run(engine)
    assert again.num_cached == 0
    assert (engine.prefix_stats, engine.draft_prefix_stats) == before
    assert engine.pool.used == held
    third = engine.add(prompt, open_to_all)
    run(engine)
    assert third.num_cached == len(prompt) - 1
    assert alone.output_ids == beside.output_ids == again.output_ids == third.output_ids


def test_prompt_logprobs_are_those_of_a_prompt_that_is_not_cached(make_engine: MakeEngine) -> None:
    engine = make_engine("draft_model", seed=0)
    prompt, wanted = [*SYSTEM, 5], params(**WAYS[0], prompt_logprobs=1)
    first = engine.add(prompt, wanted)
    run(engine)
    engine.add(prompt, params(**WAYS[0]))
    run(engine)
    second = engine.add(prompt, wanted)
    run(engine)
    assert len(second.prompt_logprobs) == len(prompt) - 1
    assert first.prompt_logprobs == second.prompt_logprobs
    assert second.num_cached == 0


def test_the_prefix_of_an_aborted_request_is_found(make_engine: MakeEngine) -> None:
    engine = make_engine("draft_model", limits=Limits(max_batch_tokens=64), seed=0)
    given_up = engine.add([*SYSTEM, 5], params(**WAYS[0]))
    engine.step()
    engine.abort(given_up)
    assert engine.pool.available == engine.pool.total
    second = engine.add([*SYSTEM, 6], params(**WAYS[0]))
    run(engine)
    assert second.num_cached == 64
    assert_books_balance(engine)


# --- law 3: what is retained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, {"temperature": 1.0}], ids=str)
def test_rejected_draft_tokens_are_not_retained(
    make_engine: MakeEngine, target: LanguageModel, draft: LanguageModel, way: dict[str, Any]
) -> None:
    """Only history is retained, with the keys and values of a fresh pass. Also in the draft model's cache, which holds the last draft
    until the next request, whenever a text ends."""
    wrong = ScriptedDrafter(lambda request: [7] * request.max_len)
    for method in ("draft_model", wrong):
        engine = make_engine(method, speculative_tokens=5, seed=0)
        sequences = [engine.add([*SYSTEM[:40], *tail], params(7 + i, **way)) for i, tail in enumerate(TAILS)]
        for step in range(500):
            if not engine.has_work:
                break
            if step == 3:
                engine.abort(sequences[-1])
            engine.step()
        assert engine.stats.num_evaluated_tokens > engine.stats.num_accepted_tokens
        caches: list[tuple[LanguageModel, KVCache]] = [(target, engine.cache)]
        drafter = next(iter(engine._drafter_group._drafters.values()))
        if isinstance(drafter, DraftModelDrafter):
            caches.append((draft, drafter._cache))
        for model, cache in caches:
            assert cache.bytes_retained > 0
            for region in cache._retained:
                assert any(s.tokens[: len(region.tokens)] == region.tokens for s in sequences)
                cache._regions[10_000] = region  # to look at it
                assert holds_exactly(model, cache, 10_000, region.tokens)
                del cache._regions[10_000]


def test_drafts_that_begin_together_read_a_common_prefix_once(
    make_engine: MakeEngine, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("draft_model", seed=0, speculative_tokens=2)
    engine.add([*SYSTEM, 5], params(40, **WAYS[0], speculative_tokens=0))
    engine.step()  # the target has read the prefix, the draft model has not
    sequences = [engine.add([*SYSTEM, *tail], params(**WAYS[0])) for tail in TAILS]
    engine.step()
    stats = engine.draft_prefix_stats
    assert stats.num_asked_tokens == sum(len(s.tokens) - s.num_output - 1 for s in sequences)
    assert stats.num_found_tokens >= (len(TAILS) - 1) * len(SYSTEM)
    run(engine)


short = st.lists(st.integers(0, 2), max_size=12)


@given(a=short, b=short, limit=st.none() | st.integers(0, 12))
def test_common_prefix_is_the_length_of_the_common_beginning(a: list[int], b: list[int], limit: int | None) -> None:
    length = common_prefix(a, b, limit=limit)
    assert a[:length] == b[:length]
    assert length <= (len(b) if limit is None else limit)
    full = length in (len(a), len(b), limit)
    assert full or a[length] != b[length]
    for start in range(length + 1):
        assert common_prefix(a, b, start=start, limit=limit) == length
