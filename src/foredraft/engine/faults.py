"""Drafters that fail. A text does not depend on its drafts: it goes on without them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from foredraft.engine.drafter_group import DrafterGroup
from foredraft.policy import FAILED, Policy
from foredraft.utils.isolation import brief

logger = logging.getLogger("foredraft")

COOLDOWN = 32
"""Steps for which a drafter is left alone when it fails, and twice as many each time that it fails again."""
_MOST_DOUBLINGS = 10


class DrafterFaults:
    """Leaves drafters that failed alone, longer after each failure."""

    def __init__(self, drafters: DrafterGroup, policy: Policy) -> None:
        self._drafter_group = drafters
        self._policy = policy
        self._counts: Counter[str] = Counter()

    def cool_down(self, failures: Mapping[str, Exception], running: Sequence[int]) -> None:
        """failures: what happened, by the drafter's name. running: the sequences that it forgets."""
        for name, error in failures.items():
            num_steps = COOLDOWN << min(self._counts[name], _MOST_DOUBLINGS)
            self._counts[name] += 1
            self._drafter_group.forget([*running], [name])
            self._policy.cool_down([name], FAILED, num_steps)
            logger.warning(
                "drafter %s failed: %s; it is not asked for the next %d steps", name, brief(error), num_steps
            )
            logger.debug("the error of drafter %s", name, exc_info=error)
