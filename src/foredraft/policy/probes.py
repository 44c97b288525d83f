"""A bounded time budget for trying drafters that do not seem to be worth their time. A text may change, and without such probes
nothing would show that drafting has become worthwhile again."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHARE = 0.01
"""The share of all time that the probes of all drafters together may take."""
MAX_SHARE_WITH_OVERHEAD = 0.015
"""The same, including the time of planning and counting. That is negligible for steps of milliseconds, but 1 % of a step of 0.4 ms."""
COUNTING_SECONDS = 4e-6
"""The time of counting, for each sequence and step."""
FIRST_GAP, MAX_GAP = 2, 8
"""Steps from one probe to the next. The gap doubles after each probe that gained nothing, so that the budget lasts until the
text changes. It stays small enough to notice a change in time."""
MIN_STEPS_LEFT = 128
"""A drafter's balance must last for this many steps if nothing is gained."""


class ProbeBudget:
    """The probing time of each drafter in seconds, and the steps between its probes."""

    def __init__(
        self,
        drafters: Sequence[str],
        max_share: float = MAX_SHARE,
        max_share_with_overhead: float = MAX_SHARE_WITH_OVERHEAD,
    ) -> None:
        self._num_drafters = max(len(drafters), 1)
        self._max_share = max_share
        self._max_share_with_overhead = max_share_with_overhead
        self._spent = dict.fromkeys(drafters, 0.0)
        self._overhead = 0.0
        self._total = 0.0
        self._num_steps = 0
        self._gaps = dict.fromkeys(drafters, 0)
        self._last_steps = dict.fromkeys(drafters, 0)

    @property
    def spent(self) -> float:
        return sum(self._spent.values())

    def add_step(self, seconds: float, num_sequences: int = 1) -> None:
        """Count the time of a step, with or without a probe."""
        self._total += seconds
        self._num_steps += 1
        self._overhead += num_sequences * COUNTING_SECONDS

    def add_planning(self, seconds: float) -> None:
        """Count the time of making a plan."""
        self._overhead += seconds

    def spend(self, drafter: str, seconds: float, num_gained: int = 0) -> None:
        """Charge the time that a probe added to its step, less the time that plain decoding would have taken for the tokens it gained.
        If it gained any, the next probe may follow at once."""
        self._spent[drafter] += max(seconds, 0.0)
        self._gaps[drafter] = 0 if num_gained else min(max(2 * self._gaps[drafter], FIRST_GAP), MAX_GAP)
        self._last_steps[drafter] = self._num_steps

    def allows(self, drafter: str, seconds: float) -> bool:
        """Whether a probe that is expected to add `seconds` stays within the shares and is not too soon after the last one."""
        num_steps, gap = self._num_steps - self._last_steps[drafter], self._gaps[drafter]
        if num_steps < gap:
            return False
        available = min(self._max_share * self._total, self._max_share_with_overhead * self._total - self._overhead)
        balance = available / self._num_drafters - self._spent[drafter]
        return seconds <= balance and (not gap or seconds * MIN_STEPS_LEFT <= num_steps * balance)
