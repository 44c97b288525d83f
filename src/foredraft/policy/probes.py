"""Trying a drafter that does not seem to pay, at a bounded cost: texts change, and nobody would notice otherwise."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.01
"""Of all time, for the probes of all drafters together."""
SHARE_WITH_COUNTING = 0.015
"""The same with what deciding and counting take, which is nothing beside a step of milliseconds, but 1 % of one of 0.4 ms."""
COUNTING = 4e-6
"""Seconds, for each sequence and step."""


class Probes:
    """Accounts of time, in seconds. What a probe brought is not set against what it cost."""

    def __init__(
        self, drafters: Sequence[str], share: float = SHARE, share_with_counting: float = SHARE_WITH_COUNTING
    ) -> None:
        self._num_drafters = max(len(drafters), 1)
        self._share = share
        self._share_with_counting = share_with_counting
        self._spent = dict.fromkeys(drafters, 0.0)
        self._counting = 0.0
        self._total = 0.0

    @property
    def spent(self) -> float:
        return sum(self._spent.values())

    def pass_time(self, seconds: float, num_sequences: int = 1) -> None:
        """What all steps take, probes or not."""
        self._total += seconds
        self._counting += num_sequences * COUNTING

    def plan(self, seconds: float) -> None:
        """What deciding took."""
        self._counting += seconds

    def spend(self, drafter: str, seconds: float) -> None:
        """What a probe added to its step."""
        self._spent[drafter] += max(seconds, 0.0)

    def may(self, drafter: str, seconds: float) -> bool:
        """Whether a probe that is expected to add so much keeps within the shares."""
        room = min(self._share * self._total, self._share_with_counting * self._total - self._counting)
        return (self._spent[drafter] + seconds) * self._num_drafters <= room
