"""Drafters and the policy that chooses among them, for texts that another engine writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from foredraft.engine.drafter_group import DrafterGroup, Drafts
from foredraft.engine.faults import DrafterFaults
from foredraft.engine.proposal import Drafter, Proposal
from foredraft.engine.step import Outcome, ScheduledSequence, Step
from foredraft.integrations.vllm.texts import Row, Texts
from foredraft.policy import Policy

_NO_LOGITS = torch.empty(0, 0)


class _Planned:
    """The drafts of a call, and what the next step is measured against. started: when that call began."""

    def __init__(self, started: float, scheduled: Sequence[ScheduledSequence], drafts: Drafts) -> None:
        self.started = started + drafts.check_time  # the checks do not count as the step's time
        self.items = {item.sequence.seq_id: item for item in scheduled}
        self.ids = dict(zip(self.items, drafts.proposal.draft_ids, strict=True))
        self.proposal, self.times = drafts.proposal, drafts.times


class Drafting:
    """drafters: by the policy's names for them. vocab_size: of the target. most: the most draft tokens of a sequence. learns: whether
    the policy observes the outcomes of drafts. clock: in seconds."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        policy: Policy,
        texts: Texts,
        vocab_size: int,
        most: int,
        *,
        learns: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group = DrafterGroup(drafters)
        self._policy = policy
        self._faults = DrafterFaults(self._group, policy)
        self._texts = texts
        self._vocab_size = vocab_size
        self._most = most
        self._learns = learns
        self._clock = clock
        self._planned: _Planned | None = None

    def step(self, rows: Sequence[Row | None]) -> list[list[int]]:
        """A draft for each row, which continues its history; empty for a row that is still reading its prompt. rows: the output of the
        previous step."""
        started = self._clock()
        if self._learns:
            self._observe(rows, started)
        running = [row.sequence for row in rows if row is not None]
        self._policy.begin([row.sequence for row in rows if row is not None and row.new_ids])  # not those that join now
        scheduled = []
        for sequence in running:
            drafter, max_draft, _ = self._policy.draft_budget(sequence)
            scheduled.append(ScheduledSequence(sequence, 1, True, min(max_draft, self._most), drafter))
        drafts = self._group.propose(scheduled, self._vocab_size)
        if drafts.failures:
            self._faults.cool_down(drafts.failures, [sequence.seq_id for sequence in running])
        self._planned = _Planned(started, scheduled, drafts)
        self._group.forget(self._texts.ended())
        return [[] if row is None else self._planned.ids[row.sequence.seq_id] for row in rows]

    def reset(self) -> None:
        """Forget all texts."""
        self._planned = None
        self._group.forget(self._texts.clear())

    def _observe(self, rows: Sequence[Row | None], now: float) -> None:
        """Give the policy the outcomes of the last drafts. A step that also read prompts shows how much was accepted, but not how long
        verification takes; it is ignored if nothing was drafted."""
        planned = self._planned
        if planned is None:
            return
        scored = [row for row in rows if row is not None and row.new_ids and row.sequence.seq_id in planned.items]
        is_pure = len(scored) == len(rows) == len(planned.items)
        if not scored or not (is_pure or planned.times):
            return
        scoring = [planned.items[row.sequence.seq_id] for row in scored]
        outcomes = [_outcome(planned.ids[row.sequence.seq_id], row.new_ids) for row in scored]
        others = [] if is_pure else [_reading(scoring[0])]
        num_kept = [len(row.new_ids) for row in scored]
        seconds = now - planned.started
        drafted = sum(planned.times.values())
        self._policy.observe(
            Step(
                [*scoring, *others],
                scoring,
                Proposal.certain([outcome.draft_ids for outcome in outcomes]),
                outcomes,
                planned.times,
                read_time=max(seconds - drafted, 0.0),
                verify_time=0.0,
                num_kept=num_kept,
                total_time=seconds,
            )
        )


def _outcome(draft_ids: Sequence[int], new_ids: Sequence[int]) -> Outcome:
    """The engine may have cut the draft: the draft tokens that were written count as accepted."""
    num_accepted = 0
    for drafted, written in zip(draft_ids, new_ids[:-1], strict=False):
        if drafted != written:
            break
        num_accepted += 1
    return Outcome(draft_ids, None, range(num_accepted), list(new_ids), _NO_LOGITS, ())


def _reading(item: ScheduledSequence) -> ScheduledSequence:
    """A placeholder for the rows of a step that read prompts: the engine does not say how many there were."""
    return ScheduledSequence(item.sequence, 2, False, 0)
