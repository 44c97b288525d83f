"""How much a budget of time allows."""

from __future__ import annotations

from collections.abc import Iterator

from foredraft.bench.budget import Clock, affordable_tokens, describe_cuts


class Watch:
    """A clock that is set by the test."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def durations_of(watch: Watch, durations: Iterator[float], **settings: float) -> list[float]:
    """The durations of the rounds that a clock allows, given how long each takes."""
    clock, found = Clock(settings["budget"], None, 4, now=watch), []
    for _ in clock.rounds():
        found.append(next(durations))
        watch.seconds += found[-1]
    return found


def test_no_round_begins_that_could_be_late_if_as_slow_as_the_slowest() -> None:
    assert durations_of(Watch(), iter([1.0, 4.0, 1.0, 1.0, 1.0, 1.0]), budget=9.5) == [1.0, 4.0, 1.0]


def test_the_first_round_is_always_run() -> None:
    assert durations_of(Watch(), iter([50.0, 1.0]), budget=10.0) == [50.0]


def test_time_spent_before_the_rounds_counts() -> None:
    watch = Watch()
    clock = Clock(10.0, None, 1, now=watch)
    watch.seconds += 9.0
    rounds = clock.rounds()
    assert next(rounds) == (0, 0)
    watch.seconds += 2.0
    assert next(rounds, None) is None


def test_a_budget_is_overdrawn_after_a_quarter_more() -> None:
    watch = Watch()
    clock = Clock(100.0, None, 1, now=watch)
    watch.seconds += 125.0
    assert not clock.is_overdrawn
    watch.seconds += 1.0
    assert clock.is_overdrawn
    assert not Clock(None, None, 1, now=watch).is_overdrawn


def test_texts_are_shortened_to_the_time_left() -> None:
    assert affordable_tokens(128, 16, seconds=1.0, left=8.0) == 128
    assert affordable_tokens(128, 16, seconds=1.0, left=4.0) == 64
    assert affordable_tokens(128, 16, seconds=1.0, left=0.1) == 16
    assert affordable_tokens(128, 16, seconds=1.0, left=-3.0) == 16
    assert affordable_tokens(8, 8, seconds=9.0, left=1.0) == 8


def test_only_actual_cuts_are_reported() -> None:
    assert describe_cuts([], (128, 80), (128, 80)) == ()
    lines = describe_cuts(["suffix:4", "ngram"], (128, 80), (32, 6))
    assert lines == (
        "skipped, because the budget was used up: suffix:4, ngram",
        "texts of 32 tokens instead of 128",
        "6 of 80 questions",
    )
