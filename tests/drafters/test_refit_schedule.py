"""The schedules of adaptive drafters: how often they learn."""

from __future__ import annotations

from foredraft.drafters import CountedRefits, TimedRefits
from foredraft.engine.proposal import Proposal
from foredraft.engine.step import Step


def step_of(seconds: float) -> Step:
    return Step([], [], Proposal.certain([]), [], {}, 0.0, 0.0, total_time=seconds)


def test_timed_learning_takes_no_more_than_its_share_of_the_time() -> None:
    refits, cost = TimedRefits(share=0.02), 0.03
    for number in range(1, 2001):
        if refits.is_due:
            refits.record(16, cost)
        refits.observe(step_of(0.01))
        assert refits.seconds <= 0.02 * 0.01 * number + cost + 1e-9
    assert refits.seconds > 0.9 * 0.02 * 0.01 * 2000
    assert refits.num_tokens == 16 * refits.num_refits


def test_unused_learning_time_is_not_saved_up() -> None:
    refits = TimedRefits(share=0.02)
    refits.record(16, 0.001)
    for _ in range(1000):
        refits.observe(step_of(1.0))
    num_in_a_row = 0
    while refits.is_due:
        refits.record(16, 0.001)
        num_in_a_row += 1
    assert num_in_a_row <= 2


def test_counted_learning_does_not_depend_on_time() -> None:
    def due(seconds: float) -> list[int]:
        refits, found = CountedRefits(num_steps=4), []
        for number in range(20):
            if refits.is_due:
                refits.record(16, seconds)
                found.append(number)
            refits.observe(step_of(seconds))
        return found

    assert due(0.001) == due(10.0) == [0, 4, 8, 12, 16]
