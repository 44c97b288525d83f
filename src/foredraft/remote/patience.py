"""How long a step waits for drafts from elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

MIN_WAIT = 0.005
"""Seconds. So long a step waits whatever a pass takes: less would lose drafts to the system's scheduler."""
_NUM_PASSES = 8
_MOST_PAUSE = 19
"""Times the wait that was in vain, so that such waits take at most 5 % of the time."""


class Patience:
    """A step waits at most as long as the passes take that its draft can save, and at most max_wait. What a pass takes is measured
    between the end of one wait and the next request. After several late answers in a row nothing is asked for a while, twice as long
    each time.

    max_wait, min_wait: seconds. clock: seconds.
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
        """The step has its drafts, or goes on without."""
        self._ended = self._clock()

    def limit(self, max_draft: int) -> float:
        """Seconds. max_draft: the most draft tokens of any sequence."""
        if not self._passes:
            return self._max_wait
        return min(self._max_wait, max(self._min_wait, max_draft * median(self._passes)))

    def in_time(self) -> None:
        self._num_late = 0

    def late(self, waited: float) -> None:
        """waited: seconds, in vain"""
        self._resume_at = self._clock() + waited * min(2**self._num_late - 1, _MOST_PAUSE)
        self._num_late = min(self._num_late + 1, 16)
