"""What was measured is what is said, and more never takes less."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy import Costs
from foredraft.policy.costs import HOPE, Curve

seconds = st.floats(1e-6, 10.0)
samples = st.lists(st.tuples(st.integers(1, 32), st.integers(1, 64), seconds), min_size=1, max_size=80)


def curve_of(*points: tuple[int, int, float], times: int = 10) -> Curve:
    curve = Curve(slope=0.05)
    for n, x, value in points:
        for _ in range(times):
            curve.add(n, x, value)
    return curve


def test_nothing_is_known_of_what_was_not_measured() -> None:
    assert Curve(slope=0.1).at(1, 1) is None


def test_between_two_points_the_line_is_straight() -> None:
    curve = curve_of((1, 1, 1.0), (1, 5, 2.0), (1, 9, 6.0))
    for x, expected in ((1, 1.0), (3, 1.5), (5, 2.0), (6, 3.0), (9, 6.0)):
        assert curve.at(1, x) == pytest.approx(expected)


@given(samples)
def test_more_never_takes_less(points: Sequence[tuple[int, int, float]]) -> None:
    curve = Curve(slope=0.05)
    for n, x, value in points:
        curve.add(n, x, value)
    for n in {n for n, _, _ in points}:
        least = min(x for its_n, x, _ in points if its_n == n)
        found = [curve.at(n, x / 2) for x in range(2 * least, 2 * 70)]
        assert all(value is not None and value > 0 for value in found)
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(found) if a is not None and b is not None)


@given(samples, st.integers(1, 100), st.integers(1, 100))
def test_there_is_an_answer_for_every_number_and_it_is_a_time(
    points: Sequence[tuple[int, int, float]], n: int, x: int
) -> None:
    curve = Curve(slope=0.05)
    for sample in points:
        curve.add(*sample)
    found = curve.at(n, x)
    assert found is not None
    assert 0 < found < math.inf


@given(st.dictionaries(st.integers(1, 16), st.lists(seconds, min_size=10, max_size=10), min_size=2, max_size=6))
def test_pooling_keeps_the_sum(measured: dict[int, list[float]]) -> None:
    """What points that fall are pooled to is their mean: no time is invented and none is lost."""
    curve = Curve(slope=0.05)
    for x, values in measured.items():
        for _ in range(10):
            curve.add(1, x, values[0])
    total = sum(value for _, _, value in curve.points())
    assert total == pytest.approx(sum(values[0] for values in measured.values()))


def test_a_few_samples_do_not_count_beside_many() -> None:
    curve = curve_of((1, 1, 1.0), (1, 9, 2.0))
    curve.add(1, 5, 50.0)
    assert curve.at(1, 5) == pytest.approx(1.5)
    for _ in range(30):
        curve.add(1, 5, 1.9)
    assert curve.at(1, 5) is not None
    assert curve.at(1, 9) is not None


def test_one_that_took_very_long_does_not_spoil_the_rest() -> None:
    curve = curve_of((1, 1, 1.0), times=31)
    curve.add(1, 1, 1000.0)
    found = curve.at(1, 1)
    assert found is not None
    assert found < 1.1


@given(st.dictionaries(st.integers(1, 9), st.lists(st.booleans(), min_size=3, max_size=32), min_size=1), st.data())
def test_bad_moments_do_not_change_what_steps_take(measured: dict[int, list[bool]], data: st.DataObject) -> None:
    """As long as more than a quarter of a kind was measured undisturbed; what steps are compared with knows of both."""
    costs = Costs()
    truth = {rows: 0.010 + 0.001 * rows for rows in measured}
    taken: dict[int, list[float]] = {rows: [] for rows in measured}
    for rows, disturbed in measured.items():
        bad = [is_bad and place >= len(disturbed) // 4 + 1 for place, is_bad in enumerate(disturbed)]
        for is_bad in data.draw(st.permutations(bad)):
            taken[rows].append(truth[rows] * (data.draw(st.floats(1.1, 2.9)) if is_bad else 1.0))
            costs.record_step(1, rows, taken[rows][-1], sampled=False)
    for rows in measured:
        assert costs.step_time(1, rows, sampled=False) == pytest.approx(truth[rows])
    if 1 in measured:
        mean = costs.plain_time(1, sampled=False)
        assert mean is not None
        assert truth[1] * (1 - 1e-9) <= mean <= sum(taken[1]) / len(taken[1]) * (1 + 1e-9)


def test_what_is_measured_later_replaces_what_was() -> None:
    curve = curve_of((1, 1, 1.0), times=500)
    for _ in range(100):
        curve.add(1, 1, 3.0)
    assert curve.at(1, 1) == pytest.approx(3.0)


def test_for_a_number_of_sequences_that_was_not_measured_the_nearest_speaks() -> None:
    curve = curve_of((1, 1, 1.0), (8, 8, 4.0))
    assert curve.at(7, 8) == pytest.approx(4.0)
    assert curve.at(12, 8) == pytest.approx(4.0)
    assert curve.at(2, 1) == pytest.approx(1.0)


def test_a_single_point_has_a_slope() -> None:
    curve = curve_of((1, 4, 1.0))
    assert curve.at(1, 8) == pytest.approx(1.2)


def measured_costs() -> Costs:
    costs = Costs()
    for _ in range(8):
        costs.record_step(1, 1, 0.010, sampled=False)
        costs.record_step(1, 5, 0.012, sampled=False)
        costs.record_step(4, 4, 0.013, sampled=True)
        costs.record_draft("a", 1, 4, 0, 0.003, sampled=False)
        costs.record_draft("a", 1, 4, 100, 0.013, sampled=False)
        costs.record_draft("b", 2, 3, 0, 0.0, sampled=True)
    return costs


@pytest.mark.parametrize("pace", [1.0, 2.0, 0.5])
def test_what_is_kept_comes_back_at_the_pace_of_today(pace: float) -> None:
    """A busier machine takes longer for everything: plain steps say how much, and only then does what was kept count."""
    costs = measured_costs()
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert Costs.from_dict(again.as_dict()).as_dict() == again.as_dict()
    assert not again.knows_plain(1, sampled=False)
    for _ in range(3):
        again.record_step(1, 1, pace * 0.010, sampled=False)
    for n, x, sampled in ((1, 1, False), (1, 3, False), (2, 9, False), (4, 4, True)):
        known = costs.step_time(n, x, sampled=sampled)
        assert known is not None
        assert again.step_time(n, x, sampled=sampled) == pytest.approx(pace * known)
    for name in ("a", "b", "c"):
        known = costs.draft_time(name, 1, 4, sampled=False)
        assert again.draft_time(name, 1, 4, sampled=False) == pytest.approx(HOPE * pace * known)
    assert again.reading_time("a", 50) == pytest.approx(HOPE * pace * costs.reading_time("a", 50))


def test_what_is_kept_gives_way_to_what_is_measured() -> None:
    again = Costs.from_dict(measured_costs().as_dict())
    for _ in range(100):
        again.record_step(1, 1, 0.020, sampled=False)
    assert again.step_time(1, 1, sampled=False) == pytest.approx(0.020, rel=0.2)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(anything, anything, anything)
def test_what_was_never_given_is_refused(steps: Any, drafts: Any, reading: Any) -> None:
    for found in (steps, {"steps": steps, "drafts": drafts, "reading": reading}):
        try:
            costs = Costs.from_dict(found)
        except (KeyError, TypeError, ValueError):
            continue
        assert costs.as_dict() is not None


@pytest.mark.parametrize(
    "points",
    [
        [[1, 1, -1.0]],
        [[1, 1, math.nan]],
        [[1, 1, math.inf]],
        [[0, 1, 1.0]],
        [[1, -1, 1.0]],
        [[math.inf, 1, 1.0]],
        [[1, 1]],
        [1],
        3,
    ],
    ids=str,
)
def test_points_that_cannot_be_are_refused(points: Any) -> None:
    kept = measured_costs().as_dict()
    for broken in (
        {**kept, "steps": {**kept["steps"], "greedy": points}},
        {**kept, "drafts": [["a", "greedy", points]]},
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Costs.from_dict(broken)


@pytest.mark.parametrize("reading", [[1], 3, None, {"a": -1.0}, {"a": math.nan}, {"a": math.inf}, {"a": "x"}], ids=str)
def test_reading_times_that_cannot_be_are_refused(reading: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Costs.from_dict({**measured_costs().as_dict(), "reading": reading})


def test_a_draft_that_was_never_timed_is_thought_to_cost_nothing() -> None:
    """Trying it is how to find out."""
    assert Costs().draft_time("a", 1, 4, sampled=False) == 0.0
    assert Costs().reading_time("a", 1000) == 0.0


def test_reading_up_is_not_mistaken_for_drafting() -> None:
    costs = measured_costs()
    assert costs.draft_time("a", 1, 4, sampled=False) == pytest.approx(0.003)
    assert costs.reading_time("a", 100) == pytest.approx(0.010)


def test_greedy_and_sampled_steps_are_told_apart() -> None:
    costs = measured_costs()
    assert costs.step_time(4, 4, sampled=True) == pytest.approx(0.013)
    assert Costs().step_time(4, 4, sampled=True) is None
    assert costs.knows_plain(1, sampled=False)
    assert not costs.knows_plain(1, sampled=True)
    assert not costs.knows_plain(16, sampled=True)


def test_before_any_draft_was_verified_reading_a_prompt_tells_what_rows_add() -> None:
    costs = Costs()
    for _ in range(5):
        costs.record_step(1, 1, 0.020, sampled=False)
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.028), "a guess"
    costs.record_reading(101, 0.620)
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.020 + 8 * 0.006)
    costs.record_reading(51, 0.120)  # the first one was held up
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.020 + 8 * 0.002)
    for _ in range(5):
        costs.record_step(1, 5, 0.060, sampled=False)
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.100), "what was measured counts"


def test_reading_that_took_no_longer_makes_rows_free_and_not_cheaper_than_nothing() -> None:
    costs = Costs()
    costs.record_reading(64, 0.010)
    for _ in range(5):
        costs.record_step(1, 1, 0.020, sampled=True)
    assert costs.step_time(1, 9, sampled=True) == pytest.approx(0.020)
    assert Costs().step_time(1, 9, sampled=True) is None
