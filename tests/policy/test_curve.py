"""A curve returns what was measured, and is monotonic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy.curve import Curve

seconds = st.floats(1e-6, 10.0)
samples = st.lists(st.tuples(st.integers(1, 32), st.integers(1, 64), seconds), min_size=1, max_size=80)


def curve_of(*points: tuple[int, int, float], repeats: int = 10) -> Curve:
    curve = Curve(slope=0.05)
    for n, x, value in points:
        for _ in range(repeats):
            curve.add(n, x, value)
    return curve


def test_without_samples_nothing_is_known() -> None:
    assert Curve(slope=0.1).at(1, 1) is None


def test_values_between_two_points_are_interpolated_linearly() -> None:
    curve = curve_of((1, 1, 1.0), (1, 5, 2.0), (1, 9, 6.0))
    for x, expected in ((1, 1.0), (3, 1.5), (5, 2.0), (6, 3.0), (9, 6.0)):
        assert curve.at(1, x) == pytest.approx(expected)


@given(samples)
def test_curves_are_monotonic(points: Sequence[tuple[int, int, float]]) -> None:
    curve = Curve(slope=0.05)
    for n, x, value in points:
        curve.add(n, x, value)
    for n in {n for n, _, _ in points}:
        least = min(x for its_n, x, _ in points if its_n == n)
        times = [curve.at(n, x / 2) for x in range(2 * least, 2 * 70)]
        assert all(value is not None and value > 0 for value in times)
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(times) if a is not None and b is not None)


@given(samples, st.integers(1, 100), st.integers(1, 100))
def test_every_value_is_positive_and_finite(points: Sequence[tuple[int, int, float]], n: int, x: int) -> None:
    curve = Curve(slope=0.05)
    for sample in points:
        curve.add(*sample)
    times = curve.at(n, x)
    assert times is not None
    assert 0 < times < math.inf


@given(st.dictionaries(st.integers(1, 16), st.lists(seconds, min_size=10, max_size=10), min_size=2, max_size=6))
def test_pooling_keeps_the_sum(measured: dict[int, list[float]]) -> None:
    """Points that would decrease are pooled to their mean, so the total time does not change."""
    curve = Curve(slope=0.05)
    for x, values in measured.items():
        for _ in range(10):
            curve.add(1, x, values[0])
    total = sum(value for _, _, value in curve.points())
    assert total == pytest.approx(sum(values[0] for values in measured.values()))


def test_a_few_samples_hardly_count_beside_many() -> None:
    curve = curve_of((1, 1, 1.0), (1, 9, 2.0))
    curve.add(1, 5, 50.0)
    assert curve.at(1, 5) == pytest.approx(1.5)
    for _ in range(30):
        curve.add(1, 5, 1.9)
    assert curve.at(1, 5) is not None
    assert curve.at(1, 9) is not None


def test_one_outlier_hardly_changes_the_value() -> None:
    curve = curve_of((1, 1, 1.0), repeats=31)
    curve.add(1, 1, 1000.0)
    times = curve.at(1, 1)
    assert times is not None
    assert times < 1.1


def test_later_samples_replace_earlier_ones() -> None:
    curve = curve_of((1, 1, 1.0), repeats=500)
    for _ in range(100):
        curve.add(1, 1, 3.0)
    assert curve.at(1, 1) == pytest.approx(3.0)


def test_an_unmeasured_group_uses_the_nearest_measured_one() -> None:
    curve = curve_of((1, 1, 1.0), (8, 8, 4.0))
    assert curve.at(7, 8) == pytest.approx(4.0)
    assert curve.at(12, 8) == pytest.approx(4.0)
    assert curve.at(2, 1) == pytest.approx(1.0)


def test_a_single_point_uses_the_default_slope() -> None:
    curve = curve_of((1, 4, 1.0))
    assert curve.at(1, 8) == pytest.approx(1.2)


def test_points_of_another_curve_have_their_shape_and_the_speed_of_what_was_measured() -> None:
    """The other curve was measured while everything took three times as long."""
    curve = Curve(slope=0.05)
    curve.add_points([(1, 2, 6.0), (1, 4, 12.0), (1, 8, 24.0), (4, 4, 30.0)], factor=0.5)
    assert curve.at(1, 4) == pytest.approx(6.0)
    assert curve.num_samples(1, 4) > 0
    for _ in range(3):
        curve.add(1, 1, 1.0)  # between the points as well as at them
        curve.add(1, 2, 2.0)
    for x, expected in ((1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)):
        assert curve.at(1, x) == pytest.approx(expected)
    assert curve.at(4, 4) == pytest.approx(15.0), "of this group nothing was measured"
    for _ in range(3):
        curve.add(1, 4, 5.0)
    assert curve.at(1, 4) == pytest.approx(5.0)
