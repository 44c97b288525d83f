"""The controller's state for each sequence."""

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
    """The states by seq_id. drafters: the names of the drafters; every state has a history for each."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._drafters = list(drafters)
        self._states: dict[int, SequenceState] = {}

    def __contains__(self, sequence: TokenSequence) -> bool:
        return sequence.seq_id in self._states

    def known(self, sequence: TokenSequence) -> SequenceState | None:
        """The state of a sequence; None if it is new."""
        return self._states.get(sequence.seq_id)

    def of(self, sequence: TokenSequence) -> SequenceState:
        """The state of a sequence; created if it is new."""
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = self._states[sequence.seq_id] = SequenceState(
                {name: AcceptanceHistory() for name in self._drafters}
            )
        return state

    def num_missed(self, sequence: TokenSequence, drafter: str) -> int:
        """The number of tokens that the drafter would have to read first: a prompt, or tokens emitted while it was not used."""
        return len(sequence.tokens) - self.of(sequence).histories[drafter].num_read

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a sequence's state, if there is one."""
        self._states.pop(sequence.seq_id, None)

    def prune(self, running: Sequence[TokenSequence]) -> None:
        """Remove the states of aborted sequences, of which the policy is not notified, once there may be many."""
        if len(self._states) > 2 * len(running) + 8:
            running_ids = {sequence.seq_id for sequence in running}
            self._states = {seq_id: state for seq_id, state in self._states.items() if seq_id in running_ids}

    def forget_reads(self, drafters: Iterable[str]) -> None:
        """Record that these drafters have dropped all sequences and would have to read them again."""
        for state in self._states.values():
            for name in drafters:
                state.histories[name].num_read = 0
