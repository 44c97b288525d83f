"""Enforces a user's limits on drafters around any policy."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial

from foredraft.engine.proposal import Drafter
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step, num_counted
from foredraft.policy.base import DraftBudget, Policy
from foredraft.utils.arguments import check_thresholds
from foredraft.utils.isolation import Shield
from foredraft.utils.units import bytes_text

logger = logging.getLogger("foredraft")

LOW_ACCEPTANCE, HIGH_MEMORY = "min_acceptance_rate", "max_draft_memory"
WINDOW = 256
COOLDOWN = 512


class Guard:
    """Decides like the wrapped policy, and cools a drafter down for num_steps steps when it crosses a threshold. The
    wrapped policy then uses another drafter, if it has one, or decodes plainly. After the cooldown the drafter is tried
    again, and only its new drafts count.

    drafters: by the names that the policy uses. min_acceptance_rate: accepted / drafted, over a drafter's last `window`
    verified draft tokens; it is not checked before there are that many. max_draft_memory: bytes of cache memory that one
    drafter may hold; a drafter that holds more frees all of it. Both are checked after a step, so a step may exceed the limit.

    crossings: how often a threshold was crossed, by drafter and threshold. Such counters can be added up.

    Raises ForedraftError for an invalid threshold.
    """

    def __init__(
        self,
        policy: Policy,
        drafters: Mapping[str, Drafter],
        *,
        min_acceptance_rate: float | None = None,
        max_draft_memory: int | None = None,
        window: int = WINDOW,
        num_steps: int = COOLDOWN,
    ) -> None:
        check_thresholds(min_acceptance_rate, max_draft_memory)
        self.policy = policy
        self.crossings: Counter[tuple[str, str]] = Counter()
        self.drafters = dict(drafters)
        self._min_acceptance_rate = min_acceptance_rate
        self._max_draft_memory = max_draft_memory
        self._windows = {name: _Window(window) for name in drafters}
        self._num_steps = num_steps
        self._running_ids: list[int] = []
        self._shield = Shield()

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return self.policy.fallbacks

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._running_ids = [sequence.seq_id for sequence in running]
        self.policy.begin(running)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        return self.policy.draft_budget(sequence)

    def observe(self, step: Step) -> None:
        self.policy.observe(step)
        for name in step.draft_times:
            if self._min_acceptance_rate is not None:
                self._check_acceptance(name, self._min_acceptance_rate, step)
            if self._max_draft_memory is not None:
                self._check_memory(name, self._max_draft_memory, step)

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        return self.policy.cool_down(drafters, reason, num_steps)

    def cooldowns(self) -> dict[str, str]:
        return self.policy.cooldowns()

    def _check_acceptance(self, name: str, min_rate: float, step: Step) -> None:
        window = self._windows[name]
        for item, outcome, num_kept in zip(step.scoring, step.outcomes, step.num_kept, strict=True):
            if item.drafter == name and outcome.num_drafted:
                window.add(num_counted(item, outcome), min(outcome.num_accepted, num_kept))
        if window.is_full and window.rate < min_rate:
            measured = f"{window.rate:.1%} of its last {window.num_drafted} draft tokens were accepted"
            self._cross(name, LOW_ACCEPTANCE, measured, f"{min_rate:.1%}", step)
            window.clear()

    def _check_memory(self, name: str, max_bytes: int, step: Step) -> None:
        num_bytes = getattr(self.drafters[name], "bytes_held", 0)
        if num_bytes > max_bytes:
            measured = f"it held {bytes_text(num_bytes)} of cache memory and has given it up"
            self._cross(name, HIGH_MEMORY, measured, bytes_text(max_bytes), step)

    def _cross(self, name: str, threshold: str, measured: str, limit: str, step: Step) -> None:
        """Start a drafter's cooldown. It must not hold memory meanwhile, so it forgets every sequence."""
        drafter = self.drafters[name]
        seq_ids = [*{*self._running_ids, *(item.sequence.seq_id for item in step.scheduled)}]
        self._shield.call(drafter, partial(drafter.forget, seq_ids), None)
        self.crossings[name, threshold] += 1
        self.policy.cool_down([name], threshold, self._num_steps)
        logger.warning(
            "%s: %s (%s is %s); it is not used for the next %d steps",
            name,
            measured,
            threshold,
            limit,
            self._num_steps,
        )


class _Window:
    """The most recent drafts that together have at least num_tokens tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._drafts: deque[tuple[int, int]] = deque()
        self.num_drafted = self._num_accepted = 0

    @property
    def is_full(self) -> bool:
        return self.num_drafted >= self._num_tokens

    @property
    def rate(self) -> float:
        return self._num_accepted / self.num_drafted

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self._drafts.append((num_drafted, num_accepted))
        self.num_drafted += num_drafted
        self._num_accepted += num_accepted
        while self.num_drafted - self._drafts[0][0] >= self._num_tokens:
            oldest_drafted, oldest_accepted = self._drafts.popleft()
            self.num_drafted -= oldest_drafted
            self._num_accepted -= oldest_accepted

    def clear(self) -> None:
        self._drafts.clear()
        self.num_drafted = self._num_accepted = 0
