"""How long a step waits, by a clock that the test controls."""

from __future__ import annotations

import pytest

from foredraft.remote.patience import Patience


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def passes(patience: Patience, clock: Clock, seconds: float, count: int = 1) -> None:
    for _ in range(count):
        patience.begin()
        patience.end()
        clock.now += seconds
    patience.begin()


def test_before_a_pass_was_measured_the_setting_is_used(clock: Clock) -> None:
    assert Patience(0.3, clock=clock).limit(4) == 0.3


def test_a_step_waits_at_most_as_long_as_the_passes_that_a_draft_can_save(clock: Clock) -> None:
    patience = Patience(0.3, 0.005, clock)
    passes(patience, clock, 0.02)
    assert patience.limit(4) == pytest.approx(0.08)
    assert patience.limit(100) == 0.3, "the setting is never passed"
    assert patience.limit(0) == 0.005


def test_a_single_long_pass_does_not_count(clock: Clock) -> None:
    patience = Patience(0.3, 0.005, clock)
    passes(patience, clock, 0.01, 5)
    passes(patience, clock, 50.0)
    assert patience.limit(2) == pytest.approx(0.02)


def test_drafts_in_time_cause_no_pause(clock: Clock) -> None:
    patience = Patience(0.1, clock=clock)
    for _ in range(50):
        patience.late(0.1)
        patience.in_time()
    patience.late(0.1)
    assert not patience.is_pausing


def test_waits_without_drafts_are_limited_to_five_percent_of_the_time(clock: Clock) -> None:
    patience = Patience(0.1, clock=clock)
    waited, began = 0.0, clock.now
    for turn in range(40):
        if turn == 20:
            waited, began = 0.0, clock.now
        clock.now += 0.1
        waited += 0.1
        patience.late(0.1)
        while patience.is_pausing:
            clock.now += 0.001
    assert waited / (clock.now - began) == pytest.approx(0.05, abs=0.001)


def test_a_pause_ends(clock: Clock) -> None:
    patience = Patience(0.1, clock=clock)
    for _ in range(100):
        patience.late(0.1)
    assert patience.is_pausing
    clock.now += 2.0
    assert not patience.is_pausing
