"""run_steps submits, steps and aborts: all jobs run to their end, and nothing is left behind however the loop ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from foredraft.engine.engine import Engine
from foredraft.engine.run import run_steps


@dataclass
class Job:
    """Takes num_steps steps."""

    num_steps: int
    is_aborted: bool = False

    @property
    def is_finished(self) -> bool:
        return self.num_steps <= 0


@dataclass
class FakeEngine:
    jobs: list[Job] = field(default_factory=list)
    num_steps: int = 0

    def step(self) -> None:
        self.num_steps += 1
        for job in self.jobs:
            job.num_steps -= 1


class Timer:
    """Counts how often it is entered, and knows whether it is running."""

    def __init__(self) -> None:
        self.num_entered = 0
        self.is_running = False

    def __enter__(self) -> None:
        self.num_entered += 1
        self.is_running = True

    def __exit__(self, *_: object) -> None:
        self.is_running = False


def steps_of(engine: FakeEngine, jobs: list[Job], **kwargs: Any) -> Any:
    def abort(job: Job) -> None:
        job.is_aborted = True

    submit = kwargs.pop("submit", engine.jobs.append)
    return run_steps(cast(Engine, engine), jobs, submit=submit, abort=abort, **kwargs)


def test_it_steps_until_all_are_finished() -> None:
    engine, jobs = FakeEngine(), [Job(2), Job(5)]
    assert len(list(steps_of(engine, jobs))) == engine.num_steps == 5
    assert all(job.is_finished and job.is_aborted for job in jobs)


def test_jobs_that_are_finished_at_once_take_no_step() -> None:
    engine = FakeEngine()
    assert list(steps_of(engine, [Job(0)])) == list(steps_of(engine, [])) == []
    assert engine.num_steps == 0


def test_a_caller_that_stops_reading_aborts_all() -> None:
    engine, jobs = FakeEngine(), [Job(2), Job(5)]
    steps = steps_of(engine, jobs)
    next(steps)
    assert not any(job.is_aborted for job in jobs)
    steps.close()
    assert engine.num_steps == 1
    assert all(job.is_aborted for job in jobs)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_in_a_step_or_a_submission_aborts_all(error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error

    engine, jobs = FakeEngine(), [Job(2), Job(5)]
    with pytest.raises(error):
        list(steps_of(engine, jobs, submit=fail))
    assert all(job.is_aborted for job in jobs)

    engine, jobs = FakeEngine(), [Job(2), Job(5)]
    engine.step = fail  # type: ignore[method-assign]
    with pytest.raises(error):
        list(steps_of(engine, jobs))
    assert all(job.is_aborted for job in jobs)


def test_the_timer_runs_during_submissions_and_steps_only() -> None:
    engine, timer = FakeEngine(), Timer()
    for _ in steps_of(engine, [Job(3)], timer=timer):
        assert not timer.is_running
    assert timer.num_entered == 1 + 3
