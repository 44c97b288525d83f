"""The seam between the engine and whoever decides on drafts, and the simplest one who does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step

MEMORY_SHORT, DOES_NOT_PAY, FAILED = "memory_short", "does_not_pay", "failed"
"""Reasons to leave a drafter alone."""


class DraftBudget(NamedTuple):
    """At most max_draft draft tokens from the drafter of this name; 0 is plain decoding."""

    drafter: str
    max_draft: int


class Policy(Protocol):
    """Decides before anything is drafted, and never from the values of draft tokens (that would bias the text)."""

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        """How often it left a drafter alone that had drafted, by drafter and reason."""
        ...

    def begin(self, running: Sequence[TokenSequence]) -> None:
        """A step is being planned, for these and perhaps for some that wait."""
        ...

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        """What to draft for the sequence in this step."""
        ...

    def observe(self, step: Step) -> None:
        """What came of it."""
        ...

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        """Leave these alone for so many steps, whatever their drafts would bring; they have forgotten all texts. reason:
        "memory_short", "failed", or a threshold. -> those that were not resting already"""
        ...

    def cooldowns(self) -> dict[str, str]:
        """The drafters that are left alone in the next step because somebody said so, and for what reason."""
        ...


class FixedPolicy:
    """What the request asks for, from one drafter, less what could never be emitted: the last token of a text is the
    target's own."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._pause = Pause()
        self.fallbacks = self._pause.counts

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._pause.begin()

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        wanted = 0 if self._drafter in self._pause else sequence.speculative_tokens or 0
        return DraftBudget(self._drafter, max(0, min(wanted, sequence.room - 1)))

    def observe(self, step: Step) -> None:
        """Nothing is learnt."""

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        return self._pause.start(drafters, reason, num_steps)

    def cooldowns(self) -> dict[str, str]:
        return self._pause.cooldowns()


class Pause:
    """Drafters that are left alone for some steps. counts: how often, by drafter and reason."""

    def __init__(self) -> None:
        self._step = 0
        self._until: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def __contains__(self, name: str) -> bool:
        return self._until.get(name, 0) > self._step

    def cooldowns(self) -> dict[str, str]:
        """See Policy.resting."""
        return {name: self._reasons[name] for name, until in self._until.items() if until > self._step + 1}

    def begin(self) -> None:
        """A step goes by."""
        self._step += 1

    def start(self, names: Sequence[str], reason: str, num_steps: int) -> list[str]:
        """For what is left of this step and so many more. -> those that were not resting already"""
        new = [name for name in names if name not in self]
        self.counts.update((name, reason) for name in new)
        self._reasons.update(dict.fromkeys(new, reason))
        for name in names:
            self._until[name] = max(self._until.get(name, 0), self._step + num_steps + 1)
        return new
