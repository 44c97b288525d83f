"""The policy's state of each sequence: how many tokens a drafter has missed, and which states are dropped."""

from __future__ import annotations

from foredraft.policy import NO_DRAFTING
from foredraft.policy.sequence_state import SequenceStates
from tests.policy.simulator import text


def test_a_new_sequence_has_no_budget_and_no_drafter_has_read_it() -> None:
    states, sequence = SequenceStates(["a", "b"]), text(prompt_len=7)
    assert sequence not in states
    assert states.of(sequence).budget == NO_DRAFTING
    assert sequence in states
    assert states.of(sequence) is states.of(sequence)
    assert [states.num_missed(sequence, name) for name in ("a", "b")] == [7, 7]


def test_a_drafter_that_forgets_misses_the_whole_text() -> None:
    states, sequence = SequenceStates(["a", "b"]), text(prompt_len=7)
    for name in ("a", "b"):
        states.of(sequence).histories[name].num_read = 5
    states.forget_reads(["a"])
    assert [states.num_missed(sequence, name) for name in ("a", "b")] == [7, 2]


def test_states_of_aborted_sequences_are_dropped_once_there_are_many() -> None:
    states, sequences = SequenceStates(["a"]), [text(seq_id) for seq_id in range(30)]
    for sequence in sequences:
        states.of(sequence)
    states.prune(sequences[:20])
    assert all(sequence in states for sequence in sequences)
    states.prune(sequences[:2])
    assert [sequence for sequence in sequences if sequence in states] == sequences[:2]
    for _ in range(2):
        states.remove(sequences[0])
        assert sequences[0] not in states
