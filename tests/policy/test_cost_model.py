"""The cost model returns measured times; stored ones are scaled to the machine's current speed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy import CostModel
from foredraft.policy.cost_model import MIN_MISSED, STORED_DRAFT_FACTOR


@given(st.dictionaries(st.integers(1, 9), st.lists(st.booleans(), min_size=3, max_size=32), min_size=1), st.data())
def test_disturbed_steps_do_not_change_step_times(measured: dict[int, list[bool]], data: st.DataObject) -> None:
    """As long as more than a quarter of each kind is undisturbed. plain_time, a mean, includes the disturbed ones."""
    costs = CostModel()
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


def measured_costs() -> CostModel:
    costs = CostModel()
    for _ in range(8):
        costs.record_step(1, 1, 0.010, sampled=False)
        costs.record_step(1, 5, 0.012, sampled=False)
        costs.record_step(4, 4, 0.013, sampled=True)
        costs.record_draft("a", 1, 4, 0, 0.003, sampled=False)
        costs.record_draft("a", 1, 4, 100, 0.013, sampled=False)
        costs.record_draft("b", 2, 3, 0, 0.0, sampled=True)
    return costs


@pytest.mark.parametrize("pace", [1.0, 2.0, 0.5])
def test_stored_costs_are_scaled_to_the_current_speed(pace: float) -> None:
    """On a busier machine everything takes longer. Stored costs are used only after plain steps have shown by how much."""
    costs = measured_costs()
    again = CostModel.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert CostModel.from_dict(again.as_dict()).as_dict() == again.as_dict()
    assert not again.knows_plain_time(1, sampled=False)
    for _ in range(3):
        again.record_step(1, 1, pace * 0.010, sampled=False)
    for n, x, sampled in ((1, 1, False), (1, 3, False), (2, 9, False), (4, 4, True)):
        known = costs.step_time(n, x, sampled=sampled)
        assert known is not None
        assert again.step_time(n, x, sampled=sampled) == pytest.approx(pace * known)
    for name in ("a", "b", "c"):
        known = costs.draft_time(name, 1, 4, sampled=False)
        assert again.draft_time(name, 1, 4, sampled=False) == pytest.approx(STORED_DRAFT_FACTOR * pace * known)
    assert again.reading_time("a", 50) == pytest.approx(STORED_DRAFT_FACTOR * pace * costs.reading_time("a", 50))


def test_sampled_steps_show_the_speed_for_stored_costs_of_greedy_ones() -> None:
    """So the costs of a process are stored, although an earlier one only wrote greedy texts."""
    before = CostModel()
    for _ in range(8):
        before.record_step(1, 1, 0.010, sampled=False)
        before.record_step(1, 5, 0.012, sampled=False)
    again = CostModel(before.known())
    for _ in range(8):
        again.record_step(1, 1, 0.020, sampled=True)
    assert again.step_time(1, 5, sampled=False) == pytest.approx(0.024)
    later = CostModel(again.known())
    for _ in range(8):
        later.record_step(1, 1, 0.010, sampled=True)
    assert later.step_time(1, 1, sampled=True) == pytest.approx(0.010)
    assert later.step_time(1, 5, sampled=False) == pytest.approx(0.012)


def test_the_time_of_drafting_is_not_counted_as_reading_once_it_is_known() -> None:
    costs = CostModel()
    costs.record_draft("a", 1, 4, 100, 0.013, sampled=False)
    assert costs.reading_time("a", 100) == pytest.approx(0.013), "an upper bound"
    for _ in range(3):
        costs.record_draft("a", 1, 4, 0, 0.003, sampled=False)
    assert costs.reading_time("a", 100) == pytest.approx(0.010)


def test_measured_costs_replace_stored_ones() -> None:
    again = CostModel.from_dict(measured_costs().as_dict())
    for _ in range(100):
        again.record_step(1, 1, 0.020, sampled=False)
    assert again.step_time(1, 1, sampled=False) == pytest.approx(0.020, rel=0.2)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(anything, anything, anything, anything)
def test_input_that_as_dict_cannot_write_is_refused(steps: Any, drafts: Any, reading: Any, factors: Any) -> None:
    for fields in (steps, {"steps": steps, "drafts": drafts, "reading": reading, "tree_factors": factors}):
        try:
            costs = CostModel.from_dict(fields)
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
def test_impossible_points_are_refused(points: Any) -> None:
    kept = measured_costs().as_dict()
    for broken in (
        {**kept, "steps": {**kept["steps"], "greedy": points}},
        {**kept, "drafts": [["a", "greedy", "chain", points]]},
    ):
        with pytest.raises((KeyError, TypeError, ValueError)):
            CostModel.from_dict(broken)


@pytest.mark.parametrize("reading", [[1], 3, None, {"a": -1.0}, {"a": math.nan}, {"a": math.inf}, {"a": "x"}], ids=str)
def test_impossible_reading_times_are_refused(reading: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostModel.from_dict({**measured_costs().as_dict(), "reading": reading})


@pytest.mark.parametrize("factors", [[1], {"greedy": -1.0}, {"greedy": math.nan}, {"lazy": 1.0}], ids=str)
def test_impossible_tree_factors_are_refused(factors: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostModel.from_dict({**measured_costs().as_dict(), "tree_factors": factors})


def test_steps_with_trees_have_their_own_time() -> None:
    costs = measured_costs()
    assert costs.step_time(1, 5, sampled=False, is_tree=True) == pytest.approx(0.012), "nothing else is known"
    for _ in range(8):
        costs.record_step(1, 3, 1.2 * 0.011, sampled=False, is_tree=True)
    assert costs.step_time(1, 5, sampled=False, is_tree=True) == pytest.approx(1.2 * 0.012)
    assert costs.step_time(1, 5, sampled=False) == pytest.approx(0.012)
    assert costs.step_time(4, 4, sampled=True, is_tree=True) == pytest.approx(0.013)
    again = CostModel.from_dict(costs.as_dict())
    for _ in range(3):
        again.record_step(1, 1, 0.010, sampled=False)
    assert again.step_time(1, 5, sampled=False, is_tree=True) == pytest.approx(1.2 * 0.012)


def test_drafts_of_trees_and_chains_are_timed_separately() -> None:
    costs = measured_costs()
    assert costs.draft_time("a", 1, 4, sampled=False, is_tree=True) == pytest.approx(0.003), (
        "as a chain, until it is known"
    )
    for _ in range(3):
        costs.record_draft("a", 1, 2, 0, 0.008, sampled=False, is_tree=True)
    assert costs.draft_time("a", 1, 2, sampled=False, is_tree=True) == pytest.approx(0.008)
    assert costs.draft_time("a", 1, 4, sampled=False) == pytest.approx(0.003)


def test_a_draft_that_was_never_timed_costs_nothing() -> None:
    """So it is tried, and thereby measured."""
    assert CostModel().draft_time("a", 1, 4, sampled=False) == 0.0
    assert CostModel().reading_time("a", 1000) == 0.0


def test_reading_and_drafting_times_are_separated() -> None:
    costs = measured_costs()
    assert costs.draft_time("a", 1, 4, sampled=False) == pytest.approx(0.003)
    assert costs.reading_time("a", 100) == pytest.approx(0.010)


def test_a_draft_after_a_few_plain_steps_says_nothing_about_reading() -> None:
    """It takes longer because the drafter is no longer in the CPU's caches. Divided by a few tokens, that would make any prompt look
    too long to be read."""
    costs = measured_costs()
    reading = costs.reading_time("a", 1000)
    for num_missed in range(1, MIN_MISSED):
        costs.record_draft("a", 1, 4, num_missed, 0.010, sampled=False)
    assert costs.reading_time("a", 1000) == reading
    assert costs.draft_time("a", 1, 4, sampled=False) == pytest.approx(0.003)


def test_greedy_and_sampled_steps_are_kept_apart() -> None:
    costs = measured_costs()
    assert costs.step_time(4, 4, sampled=True) == pytest.approx(0.013)
    assert CostModel().step_time(4, 4, sampled=True) is None
    assert costs.knows_plain_time(1, sampled=False)
    assert not costs.knows_plain_time(1, sampled=True)
    assert not costs.knows_plain_time(16, sampled=True)


def test_before_the_first_draft_prefill_gives_the_cost_of_rows() -> None:
    costs = CostModel()
    for _ in range(5):
        costs.record_step(1, 1, 0.020, sampled=False)
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.028), "a guess"
    costs.record_prefill(101, 0.620)
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.020 + 8 * 0.006)
    costs.record_prefill(51, 0.120)  # the first prefill was disturbed
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.020 + 8 * 0.002)
    for _ in range(5):
        costs.record_step(1, 5, 0.060, sampled=False)
    assert costs.step_time(1, 9, sampled=False) == pytest.approx(0.100), "what was measured counts"


def test_a_fast_prefill_never_gives_rows_a_negative_cost() -> None:
    costs = CostModel()
    costs.record_prefill(64, 0.010)
    for _ in range(5):
        costs.record_step(1, 1, 0.020, sampled=True)
    assert costs.step_time(1, 9, sampled=True) == pytest.approx(0.020)
    assert CostModel().step_time(1, 9, sampled=True) is None
