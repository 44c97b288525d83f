"""How long a step waits for drafts from another process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

MIN_WAIT = 0.005
"""Seconds. The limit is never lower, however fast a pass is: a shorter wait would lose drafts to the system's scheduler."""
_NUM_PASSES = 8
_MOST_PAUSE = 19
"""The longest pause, as a multiple of the last wait in vain, so that waits in vain take at most 5 % of the time."""


class Patience:
    """A step waits no longer than the passes that its draft can save would take, and never longer than max_wait. The time of a pass is
    measured from the end of one wait to the next request. From the second late answer in a row on, each one stops requests for a
    while, about twice as long each time.

    max_wait, min_wait, clock: in seconds.
    """

    def __init__(
        self, max_wait: float, min_wait: float = MIN_WAIT, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_wait = max_wait
        self._min_wait = min(min_wait, max_wait)
        self._clock = clock
        self._passes: deque[float] = deque(maxlen=_NUM_PASSES)
        self._ended: float | None = None
        self._num_late = 0
        self._resume_at = 0.0

    @property
    def is_pausing(self) -> bool:
        return self._clock() < self._resume_at

    def begin(self) -> None:
        """A step asks for drafts."""
        if self._ended is not None:
            self._passes.append(self._clock() - self._ended)
            self._ended = None

    def end(self) -> None:
        """The step has its drafts, or continues without them."""
        self._ended = self._clock()

    def limit(self, max_draft: int) -> float:
        """The most seconds to wait. max_draft: the most draft tokens of any sequence."""
        if not self._passes:
            return self._max_wait
        return min(self._max_wait, max(self._min_wait, max_draft * median(self._passes)))

    def in_time(self) -> None:
        self._num_late = 0

    def late(self, waited: float) -> None:
        """waited: the seconds waited in vain"""
        self._resume_at = self._clock() + waited * min(2**self._num_late - 1, _MOST_PAUSE)
        self._num_late = min(self._num_late + 1, 16)
