"""The interface of policies, which decide how much to draft, and its simplest implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.engine.token_tree import TreeShape

MEMORY_SHORT, DOES_NOT_PAY, FAILED = "memory_short", "does_not_pay", "failed"
"""Reasons for a fallback to plain decoding or to another drafter."""


class DraftBudget(NamedTuple):
    """At most max_draft draft tokens from the drafter of this name; 0 is plain decoding. shape: of the draft if it should be a
    tree."""

    drafter: str
    max_draft: int
    shape: TreeShape | None = None


NO_DRAFTING = DraftBudget("", 0)


class Hybrid(NamedTuple):
    """The names of a drafter that asks a lookup first and a model elsewhere, and of these two. The model alone is not chosen while the
    hybrid can be used, nor the lookup alone unless it promises clearly more."""

    name: str
    lookup: str
    model: str


class Policy(Protocol):
    """Decides before anything is drafted, and never depending on the values of draft tokens, which would bias the text."""

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """How often a drafter stopped being used, by drafter and reason."""
        ...

    def begin(self, running: Sequence[TokenSequence]) -> None:
        """Start a step of the running sequences. Waiting ones may still join it."""
        ...

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        """How many tokens to draft for the sequence in this step, and by which drafter."""
        ...

    def observe(self, step: Step) -> None:
        """Learn from a step after its tokens are committed."""
        ...

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        """Do not use these drafters for num_steps steps, whatever their drafts would gain. They have dropped all state.

        reason: MEMORY_SHORT, FAILED, or the name of a threshold. -> the drafters that were not cooling down already
        """
        ...

    def cooldowns(self) -> dict[str, str]:
        """The drafters that are cooling down in the next step, with the reason for each."""
        ...


class FixedPolicy:
    """Drafts as many tokens as the request wants, from one drafter, but none that could never be emitted: the last token
    of a text is always the target's own. shape: of the drafts, for a drafter that grows trees."""

    def __init__(self, drafter: str, shape: TreeShape | None = None) -> None:
        self._drafter = drafter
        self._shape = shape
        self._cooldowns = Cooldowns()
        self.fallbacks = self._cooldowns.counts

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._cooldowns.next_step()

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        wanted = 0 if self._drafter in self._cooldowns else sequence.speculative_tokens or 0
        return DraftBudget(self._drafter, max(0, min(wanted, sequence.room - 1)), self._shape)

    def observe(self, step: Step) -> None:
        """A fixed policy learns nothing."""

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        return self._cooldowns.start(drafters, reason, num_steps)

    def cooldowns(self) -> dict[str, str]:
        return self._cooldowns.reasons()


class Cooldowns:
    """The drafters that are cooling down. counts: how many cooldowns began, by drafter and reason."""

    def __init__(self) -> None:
        self._step = 0
        self._end_steps: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def __contains__(self, drafter: str) -> bool:
        return self._end_steps.get(drafter, 0) > self._step

    def reasons(self) -> dict[str, str]:
        """See Policy.cooldowns."""
        return {name: self._reasons[name] for name, end in self._end_steps.items() if end > self._step + 1}

    def next_step(self) -> None:
        self._step += 1

    def start(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        """Start a cooldown for the rest of this step and num_steps more. -> the drafters that were not cooling down already"""
        new = [name for name in drafters if name not in self]
        self.counts.update((name, reason) for name in new)
        self._reasons.update(dict.fromkeys(new, reason))
        for name in drafters:
            self._end_steps[name] = max(self._end_steps.get(name, 0), self._step + num_steps + 1)
        return new
