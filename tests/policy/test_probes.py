"""Whatever happens, probes stay within their share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy.probes import SHARE, Probes

NAMES = ("a", "b", "c")
LONGEST = 1.0
times = st.floats(0.0, LONGEST)
# a step that takes so long, and a probe of some drafter that was thought to add so much and added so much
events = st.lists(st.tuples(times, st.sampled_from(NAMES), times, times), max_size=200)


@given(events, st.floats(0.0, 0.2))
def test_no_more_is_spent_than_the_share_and_one_probe_of_each(
    history: Sequence[tuple[float, str, float, float]], share: float
) -> None:
    probes, total = Probes(NAMES, share), 0.0
    for seconds, name, expected, added in history:
        probes.pass_time(seconds)
        total += seconds
        if probes.may(name, expected):
            probes.spend(name, added)
        assert probes.spent <= share * total + len(NAMES) * LONGEST + 1e-9


@given(events)
def test_where_the_cost_was_foreseen_the_share_is_kept_exactly(
    history: Sequence[tuple[float, str, float, float]],
) -> None:
    probes, total = Probes(NAMES, 0.01), 0.0
    for seconds, name, expected, _ in history:
        probes.pass_time(seconds)
        total += seconds
        if probes.may(name, expected):
            probes.spend(name, expected)
        assert probes.spent <= 0.01 * total + 1e-9


def test_a_probe_that_seemed_to_take_less_than_nothing_earns_no_others() -> None:
    probes = Probes(["a"], 0.01)
    probes.pass_time(10.0)
    probes.spend("a", -100.0)
    assert not probes.may("a", 1.0)


def test_a_dear_drafter_does_not_use_up_the_account_of_a_cheap_one() -> None:
    probes = Probes(["dear", "cheap"], 0.01)
    probes.pass_time(10.0)
    assert probes.may("dear", 0.05)
    probes.spend("dear", 5.0)
    assert not probes.may("dear", 0.01)
    assert probes.may("cheap", 0.01)


def test_the_share_is_within_what_is_promised() -> None:
    assert 0 < SHARE <= 0.01


def test_probes_that_bring_nothing_come_ever_more_seldom_and_one_that_pays_is_followed_at_once() -> None:
    probes, made = Probes(["a"], 0.5, 0.5), []
    for step in range(60):
        probes.pass_time(1.0)
        if probes.may("a", 0.01):
            probes.spend("a", 0.01)
            made.append(step)
    gaps = [after - before for before, after in pairwise(made)]
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1] <= 16
    probes.pass_time(1.0)
    while not probes.may("a", 0.01):
        probes.pass_time(1.0)
    probes.spend("a", -1.0, num_gained=2)
    probes.pass_time(1.0)
    assert probes.may("a", 0.01)


def test_an_account_is_not_emptied_at_once() -> None:
    """Half of what a long good time has saved is still there after sixty steps in which every probe was in vain."""
    probes = Probes(["a"], 0.01)
    for _ in range(1000):
        probes.pass_time(1.0)
    for _ in range(60):
        probes.pass_time(1.0)
        if probes.may("a", 0.4):
            probes.spend("a", 0.4)
    assert 0 < probes.spent <= 5.3
