"""Handles drafters that fail. A text does not depend on its drafts, so it continues without them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from foredraft.engine.drafter_group import DrafterGroup
from foredraft.policy import FAILED, Policy
from foredraft.utils.isolation import brief

logger = logging.getLogger("foredraft")

COOLDOWN = 32
"""The number of steps for which a drafter is not used after it fails; doubled each time it fails again."""
_MOST_DOUBLINGS = 10


class DrafterFaults:
    """Stops using drafters that failed for a while, longer after each failure."""

    def __init__(self, drafters: DrafterGroup, policy: Policy) -> None:
        self._drafter_group = drafters
        self._policy = policy
        self._counts: Counter[str] = Counter()

    def cool_down(self, failures: Mapping[str, Exception], running: Sequence[int]) -> None:
        """Stop using these drafters for a while. failures: the exceptions, by drafter. running: the sequences that they forget."""
        for name, error in failures.items():
            num_steps = COOLDOWN << min(self._counts[name], _MOST_DOUBLINGS)
            self._counts[name] += 1
            self._drafter_group.forget([*running], [name])
            self._policy.cool_down([name], FAILED, num_steps)
            logger.warning("drafter %s failed: %s; it is not used for the next %d steps", name, brief(error), num_steps)
            logger.debug("the error of drafter %s", name, exc_info=error)
