"""Who is asked for drafts in a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from foredraft.policy import Ask, FixedPolicy
from foredraft.sequence import TokenSequence
from foredraft.step import Step

_TURN = 8


class InTurn:
    """Drafters in turn, for as many tokens as the request wants: in one text one after the other, and at the same time
    different ones in different texts. A policy that drafts what pays may draft nothing, and a test of that shows nothing.

    Whose turn it is follows from the number and the length of a text alone, so it cannot bias it.
    """

    def __init__(self, drafters: Sequence[str]) -> None:
        self._drafters = [FixedPolicy(name) for name in drafters]

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return sum((drafter.fallbacks for drafter in self._drafters), Counter())

    def begin(self, running: Sequence[TokenSequence]) -> None:
        for drafter in self._drafters:
            drafter.begin(running)

    def ask(self, sequence: TokenSequence) -> Ask:
        # texts come in twos, of which the second one's drafts are worsened
        turn = sequence.seq_id // 2 + len(sequence.tokens) // _TURN
        return self._drafters[turn % len(self._drafters)].ask(sequence)

    def observe(self, step: Step) -> None:
        """Nothing is learnt."""

    def rest(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        new = [name for drafter in self._drafters for name in drafter.rest(drafters, reason, num_steps)]
        return list(dict.fromkeys(new))

    def resting(self) -> dict[str, str]:
        return {name: why for drafter in self._drafters for name, why in drafter.resting().items()}
