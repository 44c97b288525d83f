"""When a drafter that adapts learns from the texts: for a share of the time, or every so many steps.

Neither looks at a token, so what is drafted depends on texts that are already committed, and on nothing else of them.
"""

from __future__ import annotations

from typing import Protocol

from foredraft.engine.proposal import Drafter
from foredraft.engine.step import Step

TIME_SHARE = 0.01
STEPS_PER_REFIT = 64


class RefitSchedule(Protocol):
    """Is shown the engine's steps, and counts what was learned.

    num_refits: how often something was learned. num_tokens: from how many places in texts. seconds: that this took.
    """

    num_refits: int
    num_tokens: int
    seconds: float

    @property
    def is_due(self) -> bool: ...

    def observe(self, step: Step) -> None: ...

    def record(self, num_tokens: int, seconds: float) -> None:
        """Something was learned."""
        ...


def refits_of(drafter: Drafter) -> RefitSchedule | None:
    """When it learns, and how often it did; None for a drafter that does not adapt."""
    refits: RefitSchedule | None = getattr(drafter, "refits", None)
    return refits


class _Counts:
    def __init__(self) -> None:
        self.num_refits = self.num_tokens = 0
        self.seconds = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        self.num_refits += 1
        self.num_tokens += num_tokens
        self.seconds += seconds


class TimedRefits(_Counts):
    """Learning takes at most this share of the steps' time, and one refit more: the next begins when the time for one as long as the
    last has been saved up."""

    def __init__(self, share: float = TIME_SHARE) -> None:
        super().__init__()
        self._share = share
        self._saved = self._last = 0.0

    @property
    def is_due(self) -> bool:
        return self._saved >= self._last

    def observe(self, step: Step) -> None:
        # what a step without a use for it leaves is not kept for a burst of them later
        self._saved = min(self._saved + self._share * step.total_time, 2 * self._last)

    def record(self, num_tokens: int, seconds: float) -> None:
        super().record(num_tokens, seconds)
        self._saved -= seconds
        self._last = seconds


class CountedRefits(_Counts):
    """Every num_steps steps, whatever that costs: the same in every run of the same requests."""

    def __init__(self, num_steps: int = STEPS_PER_REFIT) -> None:
        super().__init__()
        self._num_steps = num_steps
        self._waited = num_steps

    @property
    def is_due(self) -> bool:
        return self._waited >= self._num_steps

    def observe(self, step: Step) -> None:
        self._waited += 1

    def record(self, num_tokens: int, seconds: float) -> None:
        super().record(num_tokens, seconds)
        self._waited = 0
