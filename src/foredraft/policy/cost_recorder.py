"""Measures the costs of steps and drafts from the engine's own steps."""

from __future__ import annotations

from collections.abc import Sequence, Set

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.policy.cost_model import CostModel
from foredraft.policy.sequence_state import SequenceStates

_MAX_PLAIN_AGE = 256


class CostRecorder:
    """costs: receives the times."""

    def __init__(self, costs: CostModel, states: SequenceStates) -> None:
        self._costs = costs
        self._states = states
        self._plain_measured_at: dict[tuple[int, bool], int] = {}
        self._last_drafters: Set[str] = frozenset()

    def needs_plain_step(self, num_sequences: int, step: int, *, sampled: bool) -> bool:
        """Whether the time of a plain step, to which drafting is compared, is unknown or old."""
        measured_at = self._plain_measured_at.get((num_sequences, sampled))
        if measured_at is not None and step - measured_at > _MAX_PLAIN_AGE:
            return True
        return not self._costs.knows_plain_time(num_sequences, sampled=sampled)

    def record_prefill(self, step: Step) -> None:
        """Record a step that read prompts, which shows the time of many rows before any draft was verified."""
        num_rows = sum([item.num_unread for item in step.scheduled])
        if num_rows > len(step.scheduled) and not step.reads_sources:
            self._costs.record_prefill(num_rows, step.total_time)

    def record(self, step: Step, number: int) -> None:
        """Record the times of a step. number: of the step.

        Only steps that follow one of the same kind count. The first one after another kind runs code and reads memory that are not in
        the CPU's caches, and takes half as long again.
        """
        sampled = is_sampled([item.sequence for item in step.scoring])
        num_sequences = len(step.scheduled)
        is_usual = (
            step.draft_times.keys() == self._last_drafters
            and len(step.scoring) == num_sequences
            and sum([item.num_unread for item in step.scheduled]) == num_sequences
            and not step.reads_sources
        )
        if is_usual:
            num_rows = step.num_rows
            seconds = step.total_time - step.draft_time
            is_tree = any(item.shape is not None for item in step.scoring)
            self._costs.record_step(num_sequences, num_rows, seconds, sampled=sampled, is_tree=is_tree)
            if num_rows == num_sequences:
                self._plain_measured_at[num_sequences, sampled] = number
        for name, seconds in step.draft_times.items():
            self._record_draft(name, seconds, step, is_usual=is_usual, sampled=sampled)

    def finish_step(self, step: Step) -> None:
        """Remember this step's drafters, to compare the next step with."""
        self._last_drafters = step.draft_times.keys()

    def _record_draft(self, name: str, seconds: float, step: Step, *, is_usual: bool, sampled: bool) -> None:
        drafted = [
            (item, num_kept)
            for item, num_kept in zip(step.scoring, step.num_kept, strict=True)
            if item.drafter == name and item.max_draft
        ]
        # as of before the step's tokens were committed
        num_missed = sum([self._states.num_missed(item.sequence, name) - num_kept for item, num_kept in drafted])
        forms = {item.shape is not None for item, _ in drafted}
        # with new sources, a draft model with an encoder has run that too
        if (
            (is_usual or num_missed) and not step.reads_sources and len(forms) == 1
        ):  # chains and trees in one step cannot be timed separately
            depth = max(item.max_draft if item.shape is None else item.shape.depth for item, _ in drafted)
            self._costs.record_draft(
                name, len(drafted), depth, num_missed, seconds, sampled=sampled, is_tree=forms == {True}
            )


def is_sampled(sequences: Sequence[TokenSequence]) -> bool:
    """Whether any of them samples its tokens: such steps have costs of their own."""
    return any(not sequence.sampler.is_greedy for sequence in sequences)
