"""The seam between the engine and whoever decides on drafts, and the simplest one who does."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from foredraft.sequence import TokenSequence
from foredraft.step import Step

logger = logging.getLogger("foredraft")

MEMORY_SHORT, DOES_NOT_PAY = "memory_short", "does_not_pay"
"""Reasons to leave a drafter alone."""


class Ask(NamedTuple):
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

    def ask(self, sequence: TokenSequence) -> Ask:
        """What to draft for the sequence in this step."""
        ...

    def observe(self, step: Step) -> None:
        """What came of it."""
        ...

    def memory_short(self, drafters: Sequence[str]) -> None:
        """There was no room for the target's own keys and values; what these drafters held was given up."""
        ...

    def resting(self) -> dict[str, str]:
        """The drafters that are left alone for now, whatever their drafts would bring, and what for: "memory_short", or
        the threshold that they crossed."""
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

    def ask(self, sequence: TokenSequence) -> Ask:
        wanted = 0 if self._drafter in self._pause else sequence.speculative_tokens or 0
        return Ask(self._drafter, max(0, min(wanted, sequence.room - 1)))

    def observe(self, step: Step) -> None:
        """Nothing is learnt."""

    def memory_short(self, drafters: Sequence[str]) -> None:
        self._pause.start(drafters)

    def resting(self) -> dict[str, str]:
        return self._pause.resting()


class Pause:
    """The drafters that had to give up their memory, for some steps: taken back at once, it would be asked for again."""

    def __init__(self, num_steps: int = 32) -> None:
        self._num_steps = num_steps
        self._step = 0
        self._until: dict[str, int] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def __contains__(self, name: str) -> bool:
        return self._until.get(name, 0) > self._step

    def resting(self) -> dict[str, str]:
        """See Policy.resting."""
        return {name: MEMORY_SHORT for name in self._until if name in self}

    def begin(self) -> None:
        """A step goes by."""
        self._step += 1

    def start(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self]
        if new:
            logger.warning("cache memory is short: %s gave up its own for %d steps", ", ".join(new), self._num_steps)
        self.counts.update((name, MEMORY_SHORT) for name in new)
        self._until.update(dict.fromkeys(names, self._step + self._num_steps))
