"""What the controller knows of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foredraft.engine.sequence import TokenSequence
from foredraft.policy.acceptance import AcceptanceHistory
from foredraft.policy.base import NO_DRAFTING, DraftBudget


@dataclass(slots=True)
class SequenceState:
    """budget: the current one. histories: by drafter."""

    histories: dict[str, AcceptanceHistory]
    budget: DraftBudget = NO_DRAFTING


class SequenceStates:
    """By seq_id. drafters: the names that every state has a history for."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._drafters = list(drafters)
        self._states: dict[int, SequenceState] = {}

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence.seq_id in self._states

    def of(self, sequence: TokenSequence) -> SequenceState:
        """Creates the state of a new sequence."""
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = SequenceState(
                {name: AcceptanceHistory() for name in self._drafters}
            )
        return state

    def num_missed(self, sequence: TokenSequence, drafter: str) -> int:
        """Tokens that the drafter would have to read first: a prompt, or what came while it was not used."""
        return len(sequence.tokens) - self.of(sequence).histories[drafter].num_read

    def remove(self, sequence: TokenSequence) -> bool:
        """-> whether there was a state"""
        return self._states.pop(sequence.seq_id, None) is not None

    def prune(self, running: Sequence[TokenSequence]) -> None:
        """Remove aborted sequences, once there may be many: the policy does not see them go."""
        if len(self._states) > 2 * len(running) + 8:
            running_ids = {sequence.seq_id for sequence in running}
            self._states = {seq_id: state for seq_id, state in self._states.items() if seq_id in running_ids}

    def forget_reads(self, drafters: Iterable[str]) -> None:
        """These drafters have dropped all sequences and would have to read them again."""
        for state in self._states.values():
            for name in drafters:
                state.histories[name].num_read = 0
