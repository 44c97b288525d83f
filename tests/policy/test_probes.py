"""Probes always stay within their share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy.probes import MAX_SHARE, ProbeBudget

NAMES = ("a", "b", "c")
LONGEST = 1.0
times = st.floats(0.0, LONGEST)
# the time of a step, a drafter, and the expected and the actual cost of its probe
events = st.lists(st.tuples(times, st.sampled_from(NAMES), times, times), max_size=200)


@given(events, st.floats(0.0, 0.2))
def test_probes_exceed_their_share_by_at_most_one_probe_of_each_drafter(
    history: Sequence[tuple[float, str, float, float]], share: float
) -> None:
    probes, total = ProbeBudget(NAMES, share), 0.0
    for seconds, name, expected, added in history:
        probes.add_step(seconds)
        total += seconds
        if probes.allows(name, expected):
            probes.spend(name, added)
        assert probes.spent <= share * total + len(NAMES) * LONGEST + 1e-9


@given(events)
def test_if_expected_costs_are_right_the_share_is_never_exceeded(
    history: Sequence[tuple[float, str, float, float]],
) -> None:
    probes, total = ProbeBudget(NAMES, 0.01), 0.0
    for seconds, name, expected, _ in history:
        probes.add_step(seconds)
        total += seconds
        if probes.allows(name, expected):
            probes.spend(name, expected)
        assert probes.spent <= 0.01 * total + 1e-9


def test_a_negative_probe_cost_does_not_increase_the_budget() -> None:
    probes = ProbeBudget(["a"], 0.01)
    probes.add_step(10.0)
    probes.spend("a", -100.0)
    assert not probes.allows("a", 1.0)


def test_an_expensive_drafter_does_not_use_up_the_budget_of_a_cheap_one() -> None:
    probes = ProbeBudget(["expensive", "cheap"], 0.01)
    probes.add_step(10.0)
    assert probes.allows("expensive", 0.05)
    probes.spend("expensive", 5.0)
    assert not probes.allows("expensive", 0.01)
    assert probes.allows("cheap", 0.01)


def test_the_share_is_at_most_one_percent() -> None:
    assert 0 < MAX_SHARE <= 0.01


def test_gaps_grow_after_useless_probes_and_end_after_a_useful_one() -> None:
    probes, made = ProbeBudget(["a"], 0.5, 0.5), []
    for step in range(60):
        probes.add_step(1.0)
        if probes.allows("a", 0.01):
            probes.spend("a", 0.01)
            made.append(step)
    gaps = [after - before for before, after in pairwise(made)]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1] <= 16
    probes.add_step(1.0)
    while not probes.allows("a", 0.01):
        probes.add_step(1.0)
    probes.spend("a", -1.0, num_gained=2)
    probes.add_step(1.0)
    assert probes.allows("a", 0.01)


def test_a_large_balance_is_not_spent_at_once() -> None:
    """After a long time without probes, half of the balance is left after sixty steps in which every probe failed."""
    probes = ProbeBudget(["a"], 0.01)
    for _ in range(1000):
        probes.add_step(1.0)
    for _ in range(60):
        probes.add_step(1.0)
        if probes.allows("a", 0.4):
            probes.spend("a", 0.4)
    assert 0 < probes.spent <= 5.3
