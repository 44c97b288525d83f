"""Decaying counts, in which recent events weigh most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Numbers: TypeAlias = list[list[float]]
"""The counts of one Decay as numbers of recent events."""

_DECAY = 0.5 ** (1 / 200)
_MAX_WEIGHT = 1e9
PRIOR_WEIGHT = 6.0


class Decay:
    """Exponential decay for lists of counts, which lose half of their weight in 200 events.

    Instead of decaying all counts at every event, each event weighs more than the one before; a count only matters relative to the
    current weight.
    """

    def __init__(self, *counts: list[float]) -> None:
        self._counts = counts
        self._weight = 1.0

    def numbers(self) -> Numbers:
        return [[self.number(count) for count in counts] for counts in self._counts]

    def restore(self, numbers: Numbers, max_events: float) -> None:
        """Set the counts to the numbers() of an earlier process, all scaled down so that the first list has at most max_events. Lists
        of other lengths are ignored."""
        if [len(each) for each in numbers] != [len(counts) for counts in self._counts]:
            return
        largest = max(numbers[0], default=0.0)
        factor = min(1.0, max_events / largest) if largest else 1.0
        self._weight = 1.0
        for counts, each in zip(self._counts, numbers, strict=True):
            counts[:] = [factor * number for number in each]

    def next_weight(self) -> float:
        """The amount that the next event adds to a count."""
        self._weight /= _DECAY
        if self._weight > _MAX_WEIGHT:
            for counts in self._counts:
                counts[:] = [count / self._weight for count in counts]
            self._weight = 1.0
        return self._weight

    def number(self, count: float) -> float:
        """A count as a number of recent events."""
        return count / self._weight

    def share(self, count: float, total: float, prior: float, weight: float = PRIOR_WEIGHT) -> float:
        """count / total, at most 1, close to the prior if little was counted. weight: of the prior, in events"""
        prior_weight = weight * self._weight
        return min((count + prior_weight * prior) / (total + prior_weight), 1.0)

    def shares(self, counts: Sequence[float], totals: Sequence[float], priors: Sequence[float]) -> list[float]:
        """The share for each count."""
        return [self.share(*numbers) for numbers in zip(counts, totals, priors, strict=True)]
