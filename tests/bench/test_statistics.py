"""The intervals have the promised coverage, on data with a known truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.statistics import Interval, Percentiles, Samples, bootstrap, median_with_interval, ratio_of_rates

Pairs = st.lists(st.tuples(st.integers(1, 500), st.floats(0.01, 10.0)), min_size=2, max_size=12)


def samples(tokens: np.ndarray, seconds: np.ndarray) -> Samples:
    return Samples(tokens.astype(np.float64), seconds.astype(np.float64))


def test_the_ratios_interval_covers_the_truth_about_19_times_in_20() -> None:
    """True speedup 1.5, prompts of different length and speed, noise on both sides. 300 trials of 30 prompts.

    The percentile bootstrap covers a little less than 95 % at this size, usually 93 %. Of 300 trials with a coverage of 93 %, fewer
    than 262 hit with a probability of 1 in 10,000, and all 300 hit with one below 1 in a million. The seed is fixed, too.
    """
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        tokens = rng.integers(20, 200, size=30)
        speed = rng.gamma(20, 5, size=30)
        plain = tokens / speed * rng.gamma(100, 1 / 100, size=30)
        drafted = tokens / (1.5 * speed) * rng.gamma(25, 1 / 25, size=30)
        found = ratio_of_rates(samples(tokens, drafted), samples(tokens, plain))
        assert found.interval is not None
        hits += found.interval.low <= 1.5 <= found.interval.high
    assert 262 <= hits < 300


def test_the_medians_interval_covers_the_truth() -> None:
    """Log-normal ratios with a median of 0.9; 300 trials of 25 prompts, as above."""
    rng = np.random.default_rng(2)
    intervals = [median_with_interval(0.9 * np.exp(rng.normal(0, 0.2, size=25))).interval for _ in range(300)]
    assert 262 <= sum(found is not None and found.low <= 0.9 <= found.high for found in intervals) < 300


def test_pairing_removes_differences_between_prompts() -> None:
    """Prompts whose speed differs a hundredfold, with a constant ratio."""
    tokens = np.full(20, 100)
    seconds = np.geomspace(0.1, 10, 20)
    found = ratio_of_rates(samples(tokens, seconds / 1.25), samples(tokens, seconds))
    assert found.value == pytest.approx(1.25)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (pytest.approx(1.25), pytest.approx(1.25))


@given(Pairs)
def test_a_configuration_over_itself_is_one(pairs: list[tuple[int, float]]) -> None:
    found = ratio_of_rates(Samples.of(pairs), Samples.of(pairs))
    assert found.value == 1.0
    assert found.interval == Interval(1.0, 1.0)


@given(Pairs, Pairs)
def test_a_ratio_is_of_the_totals(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> None:
    num = min(len(ours), len(theirs))
    ours, theirs = ours[:num], theirs[:num]

    def rate(pairs: list[tuple[int, float]]) -> float:
        return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)

    found = ratio_of_rates(Samples.of(ours), Samples.of(theirs))
    assert found.value == pytest.approx(rate(ours) / rate(theirs))
    assert found.interval is not None
    assert found.interval.low <= found.interval.high


def test_one_sample_has_no_interval() -> None:
    assert ratio_of_rates(Samples.of([(10, 1.0)]), Samples.of([(10, 2.0)])).interval is None
    assert median_with_interval([1.5]).value == 1.5
    assert bootstrap(1, lambda drawn: drawn[:, 0].astype(np.float64)) is None


def test_the_same_data_give_the_same_interval() -> None:
    ratios = [1.1, 1.4, 0.9, 1.2]
    assert median_with_interval(ratios) == median_with_interval(ratios)


def test_percentiles_of_known_values_are_right() -> None:
    found = Percentiles.of([float(i) for i in range(101)])
    assert found is not None
    assert (found.p50, found.p95, found.num) == (50.0, 95.0, 101)
    assert Percentiles.of([]) is None


def test_strata_remove_differences_between_kinds() -> None:
    """Two kinds without differences inside each: if drawn in the same mix, the ratio is certain."""
    tokens, theirs = np.full(8, 100), np.ones(8)
    ours = np.repeat([1.0, 0.5], 4)
    kinds = ["story"] * 4 + ["code"] * 4
    plain = ratio_of_rates(samples(tokens, ours), samples(tokens, theirs))
    mixed = ratio_of_rates(samples(tokens, ours), samples(tokens, theirs), kinds)
    assert plain.interval is not None
    assert mixed.interval is not None
    assert plain.value == mixed.value
    assert mixed.interval.low == pytest.approx(mixed.value) == mixed.interval.high
    assert plain.interval.low < plain.value < plain.interval.high


@given(Pairs, st.data())
def test_kinds_with_one_sample_are_not_considered_certain(pairs: list[tuple[int, float]], data: st.DataObject) -> None:
    """Every sample is missing from some draw."""
    kinds = data.draw(st.lists(st.sampled_from("abc"), min_size=len(pairs), max_size=len(pairs)))
    seen: list[np.ndarray] = []

    def look(drawn: np.ndarray) -> np.ndarray:
        seen.append(drawn)
        return drawn.sum(-1).astype(np.float64)

    bootstrap(len(pairs), look, strata=kinds)
    (drawn,) = seen
    assert drawn.shape[1] == len(pairs)
    assert all((drawn != i).all(-1).any() for i in range(len(pairs)))
