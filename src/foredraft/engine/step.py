"""One step: what each sequence does in it, and its result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from foredraft.engine.proposal import Proposal, Verdict
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.token_tree import ROOT, TreeShape, depths_of
from foredraft.sampling import NO_FAILURES, Failures, select


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part in a step: read its next num_unread tokens and, if these include its pending token (`scores`), at most
    max_draft draft tokens after it, from the drafter of this name. num_read: how many of its tokens the cache held when the step was
    planned. shape: of the draft, see DraftRequest. num_source: the number of tokens of its source, if the encoder has yet to read
    them. Read-only, and not frozen for the same reason as DraftRequest."""

    sequence: TokenSequence
    num_unread: int
    scores: bool
    max_draft: int
    drafter: str = ""
    num_read: int = 0
    shape: TreeShape | None = None
    num_source: int = 0

    @property
    def num_rows(self) -> int:
        """The most rows that it adds to the target's passes."""
        return self.num_source + self.num_unread + self.max_draft


class Outcome(NamedTuple):
    """The result of verification for one sequence. draft_ids, parents: its draft, as in Proposal. path: the indices in it of the
    accepted tokens. new_ids: those tokens and the target's own. logits: [num_drafted + 1, V], before any warping, after the pending
    token and after each draft token. near_ties: for each new token; empty where none are counted.
    failed: rows of the path without a distribution, by the number of draft tokens before them -> what went wrong there."""

    draft_ids: Sequence[int]
    parents: Sequence[int] | None
    path: Sequence[int]
    new_ids: list[int]
    logits: Tensor
    near_ties: Sequence[bool]
    failed: Failures = NO_FAILURES

    @property
    def num_drafted(self) -> int:
        """The number of draft tokens, on all branches."""
        return len(self.draft_ids)

    @property
    def num_accepted(self) -> int:
        """The number of accepted draft tokens; a text that ends among them keeps fewer."""
        return len(self.path)

    @property
    def num_evaluated(self) -> int:
        """The number of accepted tokens, plus one if the draft continued after them, but not with the target's own token."""
        if self.parents is None:
            return min(self.num_accepted + 1, self.num_drafted)
        last = self.path[-1] if self.path else ROOT
        return self.num_accepted + (last in self.parents)

    @property
    def depth(self) -> int:
        """The number of tokens on the draft's longest branch."""
        if self.parents is None:
            return self.num_drafted
        return max(depths_of(self.parents), default=0)

    @property
    def ranks(self) -> list[int]:
        """The rank of each accepted draft token among its siblings: 0 for the first."""
        if self.parents is None:
            return [0] * self.num_accepted
        return [self.parents[:node].count(self.parents[node]) for node in self.path]

    @property
    def fans(self) -> list[int]:
        """The number of children of the pending token and of each accepted draft token, up to the first without children."""
        if self.parents is None:
            return [1] * self.num_evaluated
        return TreeShape(tuple(self.parents)).fans(self.ranks)

    @property
    def path_logits(self) -> Tensor:
        """[num_accepted + 1, V], the logits that the new tokens were chosen from."""
        if self.parents is None:
            return self.logits[: self.num_accepted + 1]
        return select(self.logits, [0, *(node + 1 for node in self.path)])

    @property
    def first_failed(self) -> int | None:
        """The number of draft tokens before the first failed row among the rows that were reached, which plain decoding would have
        reached too. None: no such row failed."""
        return next((row for row in range(len(self.new_ids)) if row in self.failed), None) if self.failed else None


def outcomes_of(verdict: Verdict, proposal: Proposal, logits: Sequence[Tensor]) -> list[Outcome]:
    """The outcome of each sequence. logits: for each sequence, the rows that were verified"""
    drafts = (proposal.draft_ids, proposal.draft_parents)
    columns = (*drafts, verdict.paths, verdict.next_ids, logits, verdict.near_ties, verdict.failed)
    return [
        Outcome(draft_ids, parents, path, [*(draft_ids[i] for i in path), next_id], own_logits, near_ties, failed)
        for draft_ids, parents, path, next_id, own_logits, near_ties, failed in zip(*columns, strict=True)
    ]


def num_counted(item: ScheduledSequence, outcome: Outcome) -> int:
    """How many draft tokens a policy may count: those that were drafted. For a tree without a seed, those that were requested: how many
    were drafted may depend on noise that the text will still use, and no later decision may depend on that."""
    if outcome.parents is None or not item.sequence.sampler.draws:
        return outcome.num_drafted
    return item.max_draft if item.shape is None else min(item.max_draft, len(item.shape))


@dataclass(slots=True)
class Step:
    """What happened in one step. Times in seconds. Read-only, and not frozen for the same reason as DraftRequest.

    scheduled: all sequences that took part, prefill included. scoring: those that were verified; proposal, outcomes and num_kept
    (how many of its new ids a text kept) have a row for each of these.
    draft_times: the time of each drafter that was used, by its name. read_time: the target's pass. verify_time: from logits to
    verdicts. total_time: the whole step, scheduling and commit included.
    num_kept and total_time are known only after the step is committed.
    """

    scheduled: Sequence[ScheduledSequence]
    scoring: Sequence[ScheduledSequence]
    proposal: Proposal
    outcomes: Sequence[Outcome]
    draft_times: Mapping[str, float]
    read_time: float
    verify_time: float
    num_kept: Sequence[int] = ()
    total_time: float = 0.0

    @property
    def num_rows(self) -> int:
        """The number of rows of the target's pass."""
        return sum([item.num_unread for item in self.scheduled]) + sum([one.num_drafted for one in self.outcomes])

    @property
    def reads_sources(self) -> bool:
        """Whether an encoder ran."""
        return any(item.num_source for item in self.scheduled)

    @property
    def draft_time(self) -> float:
        return sum(self.draft_times.values())

    @property
    def works(self) -> Sequence[ScheduledSequence]:
        """Deprecated: scheduled."""
        warnings.warn("Step.works is now Step.scheduled", DeprecationWarning, stacklevel=2)
        return self.scheduled


class StepTimer:
    """Measures one step, in seconds."""

    def __init__(self) -> None:
        self._began = self._last_lap = time.perf_counter()

    def lap(self) -> float:
        """The time since the last lap, or since the start."""
        before, self._last_lap = self._last_lap, time.perf_counter()
        return self._last_lap - before

    def leave_out(self, seconds: float) -> None:
        """Do not count this much of the time so far: work that later steps will not do, by which no policy should decide."""
        self._began += seconds

    def total(self) -> float:
        """The time since the start."""
        return time.perf_counter() - self._began


class Attempt(NamedTuple):
    """A step that is not committed yet, and its running timer."""

    step: Step
    timer: StepTimer

    def committed(self, num_kept: Sequence[int]) -> Step:
        """Complete the step, which ends now."""
        self.step.num_kept, self.step.total_time = num_kept, self.timer.total()
        return self.step


class Observer(Protocol):
    """Is shown every step after its tokens are committed; by then its texts may be finished and their memory freed."""

    def observe(self, step: Step) -> None: ...
