"""Wraps a policy so that its errors end no request: if it fails to decide, nothing is drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.errors import ForedraftError, shown
from foredraft.policy.base import NO_DRAFTING, DraftBudget, Policy
from foredraft.utils.isolation import Shield


class SafePolicy:
    """Wraps a policy, catches its exceptions, and logs the first. drafters: the names that it may use; any other answer counts as an
    exception."""

    def __init__(self, policy: Policy, drafters: Collection[str]) -> None:
        self._policy = policy
        self._drafters = frozenset(drafters)
        self._shield = Shield()

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return self._policy.fallbacks

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._shield.call(self._policy, lambda: self._policy.begin(running), None)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        try:  # Shield.call would take as long as the budget itself, for every sequence and step
            return self._checked(self._policy.draft_budget(sequence))
        except Exception as error:
            self._shield.log(self._policy, error)
            return NO_DRAFTING

    def _checked(self, budget: DraftBudget) -> DraftBudget:
        if not isinstance(budget, DraftBudget) or type(budget.max_draft) is not int or budget.max_draft < 0:
            raise ForedraftError(
                f"draft_budget must return a DraftBudget of 0 or more draft tokens, not {shown(budget)}"
            )
        if budget.max_draft and budget.drafter not in self._drafters:
            raise ForedraftError(
                f"draft_budget named the drafter {shown(budget.drafter)}: it must be one of {', '.join(sorted(self._drafters))}"
            )
        return budget

    def observe(self, step: Step) -> None:
        self._shield.call(self._policy, lambda: self._policy.observe(step), None)

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        return self._shield.call(self._policy, lambda: self._policy.cool_down(drafters, reason, num_steps), [])

    def cooldowns(self) -> dict[str, str]:
        return self._shield.call(self._policy, self._policy.cooldowns, {})
