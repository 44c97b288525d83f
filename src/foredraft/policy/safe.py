"""Wraps a policy so that its errors end no request: if it fails to decide, nothing is drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.policy.base import NO_DRAFTING, DraftBudget, Policy
from foredraft.utils.isolation import Shield


class SafePolicy:
    """Wraps a policy, catches its exceptions, and logs the first."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._shield = Shield()

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return self._policy.fallbacks

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._shield.call(self._policy, lambda: self._policy.begin(running), None)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        try:  # Shield.call would take as long as the budget itself, for every sequence and step
            return self._policy.draft_budget(sequence)
        except Exception as error:
            self._shield.log(self._policy, error)
            return NO_DRAFTING

    def observe(self, step: Step) -> None:
        self._shield.call(self._policy, lambda: self._policy.observe(step), None)

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        return self._shield.call(self._policy, lambda: self._policy.cool_down(drafters, reason, num_steps), [])

    def cooldowns(self) -> dict[str, str]:
        return self._shield.call(self._policy, self._policy.cooldowns, {})
