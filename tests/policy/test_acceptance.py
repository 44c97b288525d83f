"""Forecasts are what came of it before."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy.acceptance import NEW, NUM_MOODS, STALE, Acceptance, TextRecord

MAX_DRAFT = 6

budgets = st.integers(1, MAX_DRAFT + 4).flatmap(
    lambda asked: st.integers(0, asked).flatmap(
        lambda drafted: st.tuples(st.just(asked), st.just(drafted), st.integers(0, drafted))
    )
)
histories = st.lists(st.tuples(st.integers(0, NUM_MOODS - 1), budgets), max_size=60)


@given(histories, st.integers(0, NUM_MOODS - 1))
def test_a_forecast_is_possible_and_more_never_brings_less(
    history: Sequence[tuple[int, tuple[int, int, int]]], mood: int
) -> None:
    acceptance = Acceptance(MAX_DRAFT)
    for one, (num_asked, num_drafted, num_accepted) in history:
        acceptance.record(one, num_asked, num_drafted, num_accepted)
    forecast = acceptance.forecast(mood)
    assert len(forecast.num_tokens) == len(forecast.num_rows) == MAX_DRAFT + 1
    assert forecast.num_tokens[0] == 1.0
    assert forecast.num_rows[0] == 0.0
    for depth in range(1, MAX_DRAFT + 1):
        assert forecast.num_tokens[depth - 1] <= forecast.num_tokens[depth] <= depth + 1
        assert forecast.num_rows[depth - 1] <= forecast.num_rows[depth] <= depth + 1e-9
        # what stands was a row before
        assert forecast.num_tokens[depth] - 1 <= forecast.num_rows[depth] + 1e-9


def accepted(chance: Random, rates: Sequence[float], num_drafted: int) -> int:
    num_accepted = 0
    while num_accepted < num_drafted and chance.random() < rates[num_accepted]:
        num_accepted += 1
    return num_accepted


def expected_tokens(rates: Sequence[float], depth: int) -> float:
    total, survival = 1.0, 1.0
    for rate in rates[:depth]:
        survival *= rate
        total += survival
    return total


@pytest.mark.parametrize(
    "rates", [(0.9,) * 6, (0.2,) * 6, (0.8, 0.6, 0.4, 0.9, 0.9, 0.1), (0.0,) * 6, (1.0,) * 6], ids=str
)
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_it_comes_to_what_is_true(rates: Sequence[float], depth: int) -> None:
    """Known chances by place, drafts of every length: the mean of the forecasts is the expectation."""
    chance, acceptance, forecasts = Random(depth), Acceptance(MAX_DRAFT), []
    for turn in range(3000):
        num_asked = chance.randint(1, MAX_DRAFT)
        acceptance.record(3, num_asked, num_asked, accepted(chance, rates, num_asked))
        if turn > 1000:
            forecasts.append(acceptance.forecast(3).num_tokens[depth])
    assert sum(forecasts) / len(forecasts) == pytest.approx(expected_tokens(rates, depth), rel=0.05)


def test_what_was_forecast_in_a_mood_is_what_comes_in_it() -> None:
    """Three texts side by side, two steady and one that changes all the time: forecasts and outcomes agree for each mood
    (calibration), though the moods are only guessed from the outcomes."""
    chance, acceptance = Random(1), Acceptance(MAX_DRAFT)
    records = [TextRecord() for _ in range(3)]
    forecast, found, count = [0.0] * NUM_MOODS, [0.0] * NUM_MOODS, [0] * NUM_MOODS
    for now in range(6000):
        for which, record in enumerate(records):
            rate = (0.95, 0.15, 0.9 if now // 100 % 2 else 0.1)[which]
            mood = record.mood(now)
            num_accepted = accepted(chance, [rate] * 4, 4)
            if now > 1000:
                forecast[mood] += acceptance.forecast(mood).num_tokens[4]
                found[mood] += 1 + num_accepted
                count[mood] += 1
            acceptance.record(mood, 4, 4, num_accepted)
            record.record(4, num_accepted, now, acceptance.usual)
    seen = [mood for mood in range(NUM_MOODS) if count[mood] > 500]
    assert len(seen) >= 2
    for mood in seen:
        assert forecast[mood] == pytest.approx(found[mood], rel=0.1)


def test_texts_that_go_well_and_badly_are_told_apart() -> None:
    chance, acceptance = Random(2), Acceptance(MAX_DRAFT)
    rates = (0.95, 0.1)
    records = [TextRecord() for _ in rates]
    for now in range(500):
        for rate, record in zip(rates, records, strict=True):
            num_accepted = accepted(chance, [rate] * 4, 4)
            acceptance.record(record.mood(now), 4, 4, num_accepted)
            record.record(4, num_accepted, now, acceptance.usual)
    good, bad = (acceptance.forecast(record.mood(500)).num_tokens[4] for record in records)
    assert good > 3.5
    assert bad < 2.0


def test_rows_that_a_lookup_does_not_find_are_not_charged() -> None:
    chance, acceptance = Random(3), Acceptance(MAX_DRAFT)
    for _ in range(2000):
        num_drafted = 5 if chance.random() < 0.2 else 0
        acceptance.record(2, 5, num_drafted, accepted(chance, [0.9] * 5, num_drafted))
    forecast = acceptance.forecast(2)
    assert forecast.num_rows[5] == pytest.approx(0.2 * 5, abs=0.4)
    # but what it brings is counted over all the times it was asked
    assert forecast.num_tokens[5] == pytest.approx(1 + 0.2 * (expected_tokens([0.9] * 5, 5) - 1), abs=0.3)


def test_counts_fade() -> None:
    acceptance = Acceptance(MAX_DRAFT)
    for _ in range(10_000):
        acceptance.record(2, 4, 4, 4)
    assert acceptance.forecast(2).num_tokens[4] > 4.9
    for _ in range(1000):
        acceptance.record(2, 4, 4, 0)
    assert acceptance.forecast(2).num_tokens[4] < 1.2


def test_who_was_not_looked_at_for_long_is_thought_to_be_like_all_others() -> None:
    acceptance = Acceptance(MAX_DRAFT)
    for _ in range(500):
        acceptance.record(2, 4, 4, 0)
    for mood in (NEW, STALE):
        assert acceptance.forecast(mood).num_tokens[4] < 1.2


def test_how_a_text_goes_says_what_to_expect_before_anything_was_counted_of_such_texts() -> None:
    """The first text of a process that turns bad is not thought to go on as all did until then."""
    acceptance, record = Acceptance(MAX_DRAFT), TextRecord()
    for now in range(100):
        acceptance.record(record.mood(now), 4, 4, 4)
        record.record(4, 4, now, acceptance.usual)
    levels = [acceptance.forecast(mood).num_tokens[4] for mood in range(max(NEW, STALE) + 1, NUM_MOODS)]
    assert levels == sorted(levels)
    for now in range(100, 108):
        record.record(4, 0, now, acceptance.usual)
    assert acceptance.forecast(record.mood(108)).num_tokens[4] < 1.5
    acceptance.record(record.mood(108), 4, 4, 0)
    assert acceptance.forecast(record.mood(108)).num_tokens[4] < 1.5


def test_one_draft_that_fails_does_not_condemn_a_text_where_most_go_well() -> None:
    acceptance, new, bad = Acceptance(MAX_DRAFT), TextRecord(), TextRecord()
    for _ in range(60):
        acceptance.record(NEW, 1, 1, 1)
    for _ in range(30):
        acceptance.record(NEW, 1, 1, 0)
    new.record(2, 0, 1, acceptance.usual)
    assert acceptance.forecast(new.mood(1)).num_tokens[1] > 1.2
    for now in range(8):
        bad.record(2, 0, now, acceptance.usual)
    assert acceptance.forecast(bad.mood(8)).num_tokens[1] < 1.1


def test_the_usual_share_is_that_of_all_texts_and_at_first_hopeful() -> None:
    acceptance = Acceptance(MAX_DRAFT)
    assert acceptance.usual > 0.8
    for _ in range(300):
        acceptance.record(NEW, 4, 4, 1)  # of two that were evaluated one stood
    assert acceptance.usual == pytest.approx(0.5, abs=0.02)


def test_the_mood_of_a_text() -> None:
    record = TextRecord()
    assert record.mood(0) == record.mood(1000) == NEW
    record.record(4, 4, 10, 0.5)
    well = record.mood(11)
    assert well not in (NEW, STALE)
    for now in range(11, 31):
        record.record(4, 0, now, 0.5)
    assert record.mood(31) < well
    assert record.mood(1000) == STALE  # whatever it was: nobody has looked for long
