"""Plans are made about every 20 milliseconds, and less often if planning takes long."""

from __future__ import annotations

import pytest

from foredraft.policy.plan_schedule import PlanSchedule


@pytest.mark.parametrize(("step_time", "interval"), [(0.0001, 64), (0.0004, 50), (0.004, 5), (0.1, 2)])
def test_the_interval_is_twenty_milliseconds_of_steps_within_bounds(step_time: float, interval: int) -> None:
    schedule = PlanSchedule()
    schedule.record_step(step_time)
    schedule.set_next(10, at_once=False)
    assert schedule.interval == interval
    assert next(step for step in range(10, 100) if schedule.is_due(step)) == 10 + interval


def test_slow_plans_are_made_less_often() -> None:
    schedule = PlanSchedule()
    schedule.record_step(0.01)
    for _ in range(100):
        schedule.record_plan(0.002)
    schedule.set_next(0, at_once=False)
    assert schedule.interval == pytest.approx(150 * 0.002 / 0.01, abs=1)


def test_a_plan_is_due_at_once_when_the_last_one_expires() -> None:
    schedule = PlanSchedule()
    schedule.set_next(10, at_once=False)
    assert not schedule.is_due(11)
    schedule.expire()
    assert schedule.is_due(11)
    schedule.set_next(11, at_once=True)
    assert schedule.is_due(12)
