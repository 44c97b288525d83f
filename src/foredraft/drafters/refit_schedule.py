"""When an adaptive drafter learns from the texts: within a share of the time, or once every fixed number of steps.

Neither schedule looks at tokens, so drafts depend on committed text alone.
"""

from __future__ import annotations

from typing import Protocol

from foredraft.engine.proposal import Drafter
from foredraft.engine.step import Step

TIME_SHARE = 0.01
STEPS_PER_REFIT = 64


class RefitSchedule(Protocol):
    """Observes the engine's steps to decide when to refit, and counts refits.

    num_refits: how many there were. num_tokens: how many positions of texts they learned from. seconds: the time they took.
    """

    num_refits: int
    num_tokens: int
    seconds: float

    @property
    def is_due(self) -> bool: ...

    def observe(self, step: Step) -> None: ...

    def record(self, num_tokens: int, seconds: float) -> None:
        """Count one refit."""
        ...


def refits_of(drafter: Drafter) -> RefitSchedule | None:
    """A drafter's schedule and counts of refits; None for a drafter that does not adapt."""
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
    """Spend at most this share of the steps' time on refits, plus one refit: the next is due once the time that the last one took has
    been saved up."""

    def __init__(self, share: float = TIME_SHARE) -> None:
        super().__init__()
        self._share = share
        self._saved = self._last = 0.0

    @property
    def is_due(self) -> bool:
        return self._saved >= self._last

    def observe(self, step: Step) -> None:
        # capped, so that time left unused does not lead to a burst of refits later
        self._saved = min(self._saved + self._share * step.total_time, 2 * self._last)

    def record(self, num_tokens: int, seconds: float) -> None:
        super().record(num_tokens, seconds)
        self._saved -= seconds
        self._last = seconds


class CountedRefits(_Counts):
    """Refit every num_steps steps, whatever that costs: the same in every run of the same requests."""

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
