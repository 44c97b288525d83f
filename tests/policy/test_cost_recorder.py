"""Which steps are measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.engine.proposal import Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Outcome, ScheduledSequence, Step
from foredraft.policy import CostModel
from foredraft.policy.cost_recorder import CostRecorder
from foredraft.policy.sequence_state import SequenceStates
from tests.policy.simulator import text


def step_of(sequences: Sequence[TokenSequence], *, draft_time: float = 0.0, num_unread: int = 1) -> Step:
    """A step of 20 ms. If draft_time is given, one token of each sequence was drafted and rejected."""
    num_drafted = int(draft_time > 0)
    scheduled = [ScheduledSequence(s, num_unread, True, num_drafted, "a" if num_drafted else "") for s in sequences]
    outcomes = [Outcome([0] * num_drafted, None, (), [1], torch.empty(0, 0), []) for _ in sequences]
    proposal = Proposal.certain([[1] * num_drafted for _ in sequences])
    draft_times = {"a": draft_time} if num_drafted else {}
    return Step(scheduled, scheduled, proposal, outcomes, draft_times, 0.01, 0.0, [1] * len(sequences), 0.02)


def recorder_of(sequence: TokenSequence) -> tuple[CostRecorder, CostModel]:
    costs, states = CostModel(), SequenceStates(["a"])
    states.of(sequence).histories["a"].num_read = len(sequence.tokens) - 1
    return CostRecorder(costs, states), costs


def record(recorder: CostRecorder, step: Step, number: int) -> None:
    recorder.record(step, number)
    recorder.finish_step(step)


def test_plain_steps_are_needed_until_measured_and_again_after_a_long_time() -> None:
    sequence = text()
    recorder, costs = recorder_of(sequence)
    for number in range(3):
        assert recorder.needs_plain_step(1, number, sampled=False)
        record(recorder, step_of([sequence]), number)
    assert not recorder.needs_plain_step(1, 3, sampled=False)
    assert recorder.needs_plain_step(1, 3, sampled=True)
    assert recorder.needs_plain_step(1, 300, sampled=False)
    assert costs.step_time(1, 1, sampled=False) == 0.02


def test_the_first_step_of_a_new_kind_is_not_recorded() -> None:
    sequence = text()
    recorder, costs = recorder_of(sequence)
    record(recorder, step_of([sequence]), 0)
    record(recorder, step_of([sequence], draft_time=0.004), 1)
    assert costs.num_samples == 1
    record(recorder, step_of([sequence], draft_time=0.004), 2)
    assert costs.num_samples == 2
    assert costs.draft_time("a", 1, 1, sampled=False) == 0.004
    record(recorder, step_of([sequence], num_unread=4), 3)
    assert costs.num_samples == 2
