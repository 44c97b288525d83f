"""Decides when the controller makes its next plan."""

from __future__ import annotations

_PLAN_SECONDS = 0.02
_MIN_INTERVAL, _MAX_INTERVAL = 2, 64
"""Planning takes about 50 microseconds, so it is done every 20 milliseconds: every 50 steps with a small model, every two steps with
a large one. The bounds are in steps."""
_MIN_PLAN_RATIO = 150
"""For many sequences planning takes longer and is done less often: the time between two plans is at least this many times its own."""
_PLAN_TIME_WEIGHT = 0.1


class PlanSchedule:
    """interval: the number of steps between two plans."""

    def __init__(self) -> None:
        self.interval = _MIN_INTERVAL
        self._next_step = 0
        self._step_time = 0.0
        self._plan_time = 0.0

    def is_due(self, step: int) -> bool:
        return step >= self._next_step

    def expire(self) -> None:
        """Make the next plan at once."""
        self._next_step = 0

    def set_next(self, step: int, *, at_once: bool) -> None:
        """A plan was made at this step. at_once: make another one in the next."""
        if at_once:
            self._next_step = step + 1
            return
        seconds = max(_PLAN_SECONDS, _MIN_PLAN_RATIO * self._plan_time)
        self.interval = min(max(int(seconds / max(self._step_time, 1e-6)), _MIN_INTERVAL), _MAX_INTERVAL)
        self._next_step = step + self.interval

    def record_plan(self, seconds: float) -> None:
        self._plan_time += _PLAN_TIME_WEIGHT * (seconds - self._plan_time)

    def record_step(self, seconds: float) -> None:
        self._step_time = seconds
