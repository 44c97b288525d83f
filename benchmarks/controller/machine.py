"""The times of a machine that others use too."""

from __future__ import annotations

import math
from random import Random

DRIFT_SECONDS = 5.0


class Machine:
    """Disturbs times. jitter: the spread of single times. drift: the largest logarithm of a change of speed, which comes every few
    seconds. undisturbed: the sum of the times that it was given."""

    def __init__(self, seed: int, jitter: float, drift: float) -> None:
        self._chance = Random(seed)
        self._jitter, self._drift = jitter, drift
        self._now = self._until = 0.0
        self._factor = 1.0
        self.undisturbed = 0.0

    def disturbed(self, seconds: float) -> float:
        self.undisturbed += seconds
        if self._now >= self._until:
            self._factor = math.exp(self._chance.uniform(0, self._drift))
            self._until = self._now + self._chance.expovariate(1 / DRIFT_SECONDS)
        found = seconds * self._factor * math.exp(self._chance.gauss(0, self._jitter))
        self._now += found
        return found
