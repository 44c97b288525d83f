"""What drafters fail at. Drafts are worth nothing to a text: it goes on without them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from foredraft.engine.drafter_group import Panel
from foredraft.policy import FAILED, Policy
from foredraft.utils.isolation import brief

logger = logging.getLogger("foredraft")

PAUSE = 32
"""Steps for which a drafter is left alone when it fails, and twice as many each time that it fails again."""
_MOST_DOUBLINGS = 10


class DrafterFaults:
    """Leaves drafters alone that failed, for longer and longer."""

    def __init__(self, panel: Panel, policy: Policy) -> None:
        self._panel = panel
        self._policy = policy
        self._counts: Counter[str] = Counter()

    def leave_alone(self, failures: Mapping[str, Exception], running: Sequence[int]) -> None:
        """failures: what happened, by the drafter's name. running: the sequences that it forgets."""
        for name, error in failures.items():
            num_steps = PAUSE << min(self._counts[name], _MOST_DOUBLINGS)
            self._counts[name] += 1
            self._panel.forget([*running], [name])
            self._policy.rest([name], FAILED, num_steps)
            logger.warning(
                "drafter %s failed: %s; it is not asked for the next %d steps", name, brief(error), num_steps
            )
            logger.debug("the error of drafter %s", name, exc_info=error)
