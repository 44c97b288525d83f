"""Forecasts of acceptance agree with past outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy.acceptance import (
    FIRST_LEVEL,
    NEW,
    NUM_BUCKETS,
    STALE,
    STORED_DRAFTS,
    AcceptanceEstimator,
    AcceptanceHistory,
)

MAX_DRAFT = 6

budgets = st.integers(1, MAX_DRAFT + 4).flatmap(
    lambda requested: st.integers(0, requested).flatmap(
        lambda drafted: st.tuples(st.just(requested), st.just(drafted), st.integers(0, drafted))
    )
)
recorded_drafts = st.lists(st.tuples(st.integers(0, NUM_BUCKETS - 1), budgets), max_size=60)


@given(recorded_drafts, st.integers(0, NUM_BUCKETS - 1))
def test_forecasts_are_possible_and_grow_with_the_budget(
    drafts: Sequence[tuple[int, tuple[int, int, int]]], bucket: int
) -> None:
    acceptance = AcceptanceEstimator(MAX_DRAFT)
    for its_bucket, (max_draft, num_drafted, num_accepted) in drafts:
        acceptance.record(its_bucket, max_draft, num_drafted, num_accepted)
    forecast = acceptance.forecast(bucket)
    assert len(forecast.num_tokens) == len(forecast.num_rows) == MAX_DRAFT + 1
    assert forecast.num_tokens[0] == 1.0
    assert forecast.num_rows[0] == 0.0
    for depth in range(1, MAX_DRAFT + 1):
        assert forecast.num_tokens[depth - 1] <= forecast.num_tokens[depth] <= depth + 1
        assert forecast.num_rows[depth - 1] <= forecast.num_rows[depth] <= depth + 1e-9
        # every accepted token was a verified row
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
def test_forecasts_converge_to_the_true_expectation(rates: Sequence[float], depth: int) -> None:
    """With known probabilities by position and drafts of every length, the mean of the forecasts is the expectation."""
    chance, acceptance, forecasts = Random(depth), AcceptanceEstimator(MAX_DRAFT), []
    for turn in range(3000):
        max_draft = chance.randint(1, MAX_DRAFT)
        acceptance.record(3, max_draft, max_draft, accepted(chance, rates, max_draft))
        if turn > 1000:
            forecasts.append(acceptance.forecast(3).num_tokens[depth])
    assert sum(forecasts) / len(forecasts) == pytest.approx(expected_tokens(rates, depth), rel=0.05)


def test_forecasts_are_calibrated_in_every_bucket() -> None:
    """Three texts at the same time, two steady and one that keeps changing: forecasts and outcomes agree for each bucket (calibration),
    though the buckets are only inferred from the outcomes."""
    chance, acceptance = Random(1), AcceptanceEstimator(MAX_DRAFT)
    histories = [AcceptanceHistory() for _ in range(3)]
    forecast, emitted, count = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS, [0] * NUM_BUCKETS
    for now in range(6000):
        for which, history in enumerate(histories):
            rate = (0.95, 0.15, 0.9 if now // 100 % 2 else 0.1)[which]
            bucket = history.bucket(now)
            num_accepted = accepted(chance, [rate] * 4, 4)
            if now > 1000:
                forecast[bucket] += acceptance.forecast(bucket).num_tokens[4]
                emitted[bucket] += 1 + num_accepted
                count[bucket] += 1
            acceptance.record(bucket, 4, 4, num_accepted)
            history.record(num_accepted, min(4, num_accepted + 1), now, acceptance)
    seen = [bucket for bucket in range(NUM_BUCKETS) if count[bucket] > 500]
    assert len(seen) >= 2
    for bucket in seen:
        assert forecast[bucket] == pytest.approx(emitted[bucket], rel=0.1)


def test_texts_with_high_and_low_acceptance_get_different_forecasts() -> None:
    chance, acceptance = Random(2), AcceptanceEstimator(MAX_DRAFT)
    rates = (0.95, 0.1)
    histories = [AcceptanceHistory() for _ in rates]
    for now in range(500):
        for rate, history in zip(rates, histories, strict=True):
            num_accepted = accepted(chance, [rate] * 4, 4)
            acceptance.record(history.bucket(now), 4, 4, num_accepted)
            history.record(num_accepted, min(4, num_accepted + 1), now, acceptance)
    good, bad = (acceptance.forecast(history.bucket(500)).num_tokens[4] for history in histories)
    assert good > 3.5
    assert bad < 2.0


def test_rows_that_a_lookup_does_not_draft_are_not_counted() -> None:
    chance, acceptance = Random(3), AcceptanceEstimator(MAX_DRAFT)
    for _ in range(2000):
        num_drafted = 5 if chance.random() < 0.2 else 0
        acceptance.record(2, 5, num_drafted, accepted(chance, [0.9] * 5, num_drafted))
    forecast = acceptance.forecast(2)
    assert forecast.num_rows[5] == pytest.approx(0.2 * 5, abs=0.4)
    # but its tokens are averaged over all its budgets
    assert forecast.num_tokens[5] == pytest.approx(1 + 0.2 * (expected_tokens([0.9] * 5, 5) - 1), abs=0.3)


def test_old_counts_fade() -> None:
    acceptance = AcceptanceEstimator(MAX_DRAFT)
    for _ in range(10_000):
        acceptance.record(2, 4, 4, 4)
    assert acceptance.forecast(2).num_tokens[4] > 4.9
    for _ in range(1000):
        acceptance.record(2, 4, 4, 0)
    assert acceptance.forecast(2).num_tokens[4] < 1.2


def test_new_and_stale_texts_are_expected_to_be_like_all_texts() -> None:
    acceptance = AcceptanceEstimator(MAX_DRAFT)
    for _ in range(500):
        acceptance.record(2, 4, 4, 0)
    for bucket in (NEW, STALE):
        assert acceptance.forecast(bucket).num_tokens[4] < 1.2


def test_the_level_of_a_text_is_the_prior_of_its_bucket() -> None:
    """So the first text of a process whose acceptance falls is not expected to continue as all texts did before."""
    acceptance, history = AcceptanceEstimator(MAX_DRAFT), AcceptanceHistory()
    for now in range(100):
        acceptance.record(history.bucket(now), 4, 4, 4)
        history.record(4, 4, now, acceptance)
    levels = [acceptance.forecast(bucket).num_tokens[4] for bucket in range(max(NEW, STALE) + 1, NUM_BUCKETS)]
    assert levels == sorted(levels)
    for now in range(100, 108):
        history.record(0, 1, now, acceptance)
    assert acceptance.forecast(history.bucket(108)).num_tokens[4] < 1.5
    acceptance.record(history.bucket(108), 4, 4, 0)
    assert acceptance.forecast(history.bucket(108)).num_tokens[4] < 1.5


def test_a_level_without_counts_is_half_way_to_the_one_above() -> None:
    """Texts pass the level above on their way down, so it tells something about the one below."""
    estimator = AcceptanceEstimator(2)
    lowest, above = STALE + 1, STALE + 2
    at_face_value = estimator.rates(lowest)[0]
    estimator.forecast(lowest)
    for _ in range(400):
        estimator.record(above, 1, 1, 1)
    assert estimator.rates(lowest)[0] == pytest.approx((at_face_value + 1) / 2, abs=0.02)
    assert estimator.forecast(lowest).num_tokens[1] == pytest.approx(1 + estimator.rates(lowest)[0]), "not an old one"
    for _ in range(40):
        estimator.record(lowest, 1, 1, 0)
    assert estimator.rates(lowest)[0] < 0.1, "its own counts decide"


def test_a_forecast_from_few_drafts_is_optimistic() -> None:
    """So that bad luck with the first few does not end drafting; with many drafts it hardly is."""
    excess = []
    for number in (0, 10, 1000):
        estimator = AcceptanceEstimator(1)
        for turn in range(number):
            estimator.record(4, 1, 1, turn % 2)
        excess.append(estimator.forecast(4).num_tokens[1] - 1 - estimator.rates(4)[0])
    nothing, few, many = excess
    assert nothing == pytest.approx(0, abs=1e-9)
    assert few > 0.04
    assert 0 < many < 0.02


def test_one_rejected_draft_does_not_condemn_a_text_if_most_are_accepted() -> None:
    acceptance, new, bad = AcceptanceEstimator(MAX_DRAFT), AcceptanceHistory(), AcceptanceHistory()
    for _ in range(60):
        acceptance.record(NEW, 1, 1, 1)
    for _ in range(30):
        acceptance.record(NEW, 1, 1, 0)
    new.record(0, 1, 1, acceptance)
    assert acceptance.forecast(new.bucket(1)).num_tokens[1] > 1.2
    for now in range(8):
        bad.record(0, 1, now, acceptance)
    assert acceptance.forecast(bad.bucket(8)).num_tokens[1] < 1.1


def test_the_mean_rate_is_that_of_all_texts_and_optimistic_at_first() -> None:
    acceptance = AcceptanceEstimator(MAX_DRAFT)
    assert acceptance.mean_rate > 0.8
    for _ in range(300):
        acceptance.record(NEW, 4, 4, 1)  # of two evaluated tokens one was accepted
    assert acceptance.mean_rate == pytest.approx(0.5, abs=0.02)


def test_the_bucket_of_a_text() -> None:
    history = AcceptanceHistory()
    assert history.bucket(0) == history.bucket(1000) == NEW
    estimator = AcceptanceEstimator(4)
    history.record(4, 4, 10, estimator)
    well = history.bucket(11)
    assert well not in (NEW, STALE)
    for now in range(11, 31):
        history.record(0, 1, now, estimator)
    assert history.bucket(31) < well
    assert history.bucket(1000) == STALE  # whatever the score was: nothing was drafted for a long time


def test_the_counts_of_levels_are_restored_and_give_way_to_new_ones() -> None:
    before, again = AcceptanceEstimator(MAX_DRAFT), AcceptanceEstimator(MAX_DRAFT)
    for turn in range(400):
        for bucket in range(NUM_BUCKETS):
            before.record(bucket, 4, 3, (0, 0, 1, 2)[turn % 4])
    again.restore(before.levels())
    levels = range(FIRST_LEVEL, NUM_BUCKETS)
    for bucket in levels:
        assert again.rates(bucket)[:2] == pytest.approx(before.rates(bucket)[:2], abs=0.15)
        assert again.forecast(bucket).num_rows[4] == pytest.approx(before.forecast(bucket).num_rows[4], rel=0.1)
    for _ in range(STORED_DRAFTS):
        for bucket in levels:
            again.record(bucket, 4, 4, 4)
    assert all(again.rates(bucket)[0] > 0.6 for bucket in levels)


def test_of_new_texts_nothing_is_restored() -> None:
    """The texts of the next process may be others: a drafter that was useless is tried again."""
    before, again = AcceptanceEstimator(MAX_DRAFT), AcceptanceEstimator(MAX_DRAFT)
    for _ in range(400):
        before.record(NEW, 4, 4, 0)
        before.record(FIRST_LEVEL, 4, 4, 0)
    again.restore(before.levels())
    fresh = AcceptanceEstimator(MAX_DRAFT)
    for bucket in (NEW, STALE):
        assert again.forecast(bucket) == fresh.forecast(bucket)
    assert again.mean_rate == fresh.mean_rate


@pytest.mark.parametrize(("evaluated", "accepted"), [(1.0, 16.0), (0.0, 1e308)])
def test_restored_counts_that_cannot_be_give_possible_forecasts(evaluated: float, accepted: float) -> None:
    estimator = AcceptanceEstimator(MAX_DRAFT)
    counts = [[number] * MAX_DRAFT for number in (evaluated, accepted, 1.0, 16.0)]
    estimator.restore([counts] * (NUM_BUCKETS - FIRST_LEVEL))
    for bucket in range(NUM_BUCKETS):
        forecast = estimator.forecast(bucket)
        assert all(0 <= rate <= 1 for rate in estimator.rates(bucket))
        assert all(1 <= tokens <= 1 + position for position, tokens in enumerate(forecast.num_tokens))


def test_counts_of_another_number_of_positions_are_ignored() -> None:
    before, again = AcceptanceEstimator(MAX_DRAFT + 1), AcceptanceEstimator(MAX_DRAFT)
    for _ in range(400):
        before.record(FIRST_LEVEL, 4, 4, 4)
    again.restore(before.levels())
    assert again.rates(FIRST_LEVEL) == AcceptanceEstimator(MAX_DRAFT).rates(FIRST_LEVEL)
