"""Trying a drafter that does not seem to pay, at a bounded cost: texts change, and nobody would notice otherwise."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.01
"""Of all time, for the probes of all drafters together."""
SHARE_WITH_COUNTING = 0.015
"""The same with what deciding and counting take, which is nothing beside a step of milliseconds, but 1 % of one of 0.4 ms."""
COUNTING = 4e-6
"""Seconds, for each sequence and step."""
FIRST_GAP, LONGEST_GAP = 2, 8
"""Steps from one probe to the next: twice as many after each that brought nothing, so that the account lasts until the text
changes, and few enough that a change is met while it lasts."""
LASTING = 128
"""Steps for which what is on an account is to last, if nothing is gained."""


class Probes:
    """Accounts of time, in seconds, and the steps between probes."""

    def __init__(
        self, drafters: Sequence[str], share: float = SHARE, share_with_counting: float = SHARE_WITH_COUNTING
    ) -> None:
        self._num_drafters = max(len(drafters), 1)
        self._share = share
        self._share_with_counting = share_with_counting
        self._spent = dict.fromkeys(drafters, 0.0)
        self._counting = 0.0
        self._total = 0.0
        self._num_steps = 0
        self._gaps = dict.fromkeys(drafters, 0)
        self._last = dict.fromkeys(drafters, 0)

    @property
    def spent(self) -> float:
        return sum(self._spent.values())

    def pass_time(self, seconds: float, num_sequences: int = 1) -> None:
        """What all steps take, probes or not."""
        self._total += seconds
        self._num_steps += 1
        self._counting += num_sequences * COUNTING

    def plan(self, seconds: float) -> None:
        """What deciding took."""
        self._counting += seconds

    def spend(self, drafter: str, seconds: float, num_gained: int = 0) -> None:
        """What a probe added to its step, less what the tokens it gained would have taken: so one that pays may be followed by
        another at once."""
        self._spent[drafter] += max(seconds, 0.0)
        self._gaps[drafter] = 0 if num_gained else min(max(2 * self._gaps[drafter], FIRST_GAP), LONGEST_GAP)
        self._last[drafter] = self._num_steps

    def may(self, drafter: str, seconds: float) -> bool:
        """Whether a probe that is expected to add so much keeps within the shares, and is not too soon after the last."""
        num_steps, gap = self._num_steps - self._last[drafter], self._gaps[drafter]
        if num_steps < gap:
            return False
        room = min(self._share * self._total, self._share_with_counting * self._total - self._counting)
        balance = room / self._num_drafters - self._spent[drafter]
        return seconds <= balance and (not gap or seconds * LASTING <= num_steps * balance)
