"""Trying a drafter that does not seem to pay, at a bounded cost: texts change, and nobody would notice otherwise."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.005
"""Of all time, for the probes of all drafters together."""


class Probes:
    """Accounts of time, in seconds. What a probe brought is not set against what it cost."""

    def __init__(self, drafters: Sequence[str], share: float = SHARE) -> None:
        self._share = share / max(len(drafters), 1)
        self._spent = dict.fromkeys(drafters, 0.0)
        self._total = 0.0

    @property
    def spent(self) -> float:
        return sum(self._spent.values())

    def pass_time(self, seconds: float) -> None:
        """What all steps take, probes or not."""
        self._total += seconds

    def spend(self, drafter: str, seconds: float) -> None:
        """What a probe added to its step."""
        self._spent[drafter] += max(seconds, 0.0)

    def may(self, drafter: str, seconds: float) -> bool:
        """Whether a probe that is expected to add so much keeps within the share."""
        return self._spent[drafter] + seconds <= self._share * self._total
