"""Limits how much time some work may take."""

from __future__ import annotations


class TimeBudget:
    """share: the share of the elapsed time that may be spent. reserve: seconds that can be saved up, and the amount at the start.
    pause: the least number of seconds between two expenses."""

    def __init__(self, share: float, reserve: float, pause: float) -> None:
        self._share, self._pause = share, pause
        self._seconds = self._max_seconds = reserve
        self._updated_at = self._spent_at = 0.0

    def allows(self, now: float) -> bool:
        self._seconds = min(self._max_seconds, self._seconds + self._share * (now - self._updated_at))
        self._updated_at = now
        return self._seconds > 0 and now - self._spent_at >= self._pause

    def spend(self, seconds: float) -> None:
        """seconds: may exceed what is left; later work then waits longer."""
        self._seconds -= seconds
        self._spent_at = self._updated_at
