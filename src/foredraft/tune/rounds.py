"""What is kept of a run for prediction: each step's times and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.engine.step import Step


@dataclass(frozen=True, slots=True)
class Round:
    """One step. Times in seconds.

    seconds: of the clock, from the end of the step before where that belongs to the same batch. draft_seconds: of these,
    the drafter's. depth: the longest draft that was asked for. num_asked: sequences it was asked for.
    num_drafted, num_kept: of each sequence, draft tokens that were verified and tokens that reached the text.
    """

    seconds: float
    draft_seconds: float
    depth: int
    num_asked: int
    num_drafted: tuple[int, ...]
    num_kept: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return len(self.num_kept)

    def num_rows(self, speculative_tokens: int) -> int:
        """Of the target's pass, had no more than so many been asked for."""
        return len(self.num_drafted) + sum(min(drafted, speculative_tokens) for drafted in self.num_drafted)

    def num_tokens(self, speculative_tokens: int) -> int:
        """That the texts would have got: what stood, and the target's own."""
        return sum(min(kept, speculative_tokens + 1) for kept in self.num_kept)


@dataclass(frozen=True, slots=True)
class Trial:
    """One group of questions under one setting, once.

    group: which. category: of its questions. num_tokens, seconds: of all answers, as a benchmark counts them. openings: the steps in which a prompt was
    read. rounds: all others.
    """

    group: int
    num_tokens: int
    seconds: float
    openings: Sequence[Round]
    rounds: Sequence[Round]
    category: str = ""


@dataclass(slots=True)
class Recorder:
    """An engine's observer. clock: seconds that it has run."""

    clock: Callable[[], float] = time.perf_counter
    openings: list[Round] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    _ended: float | None = None

    def observe(self, step: Step) -> None:
        now = self.clock()
        is_opening = any(item.num_unread != 1 for item in step.scheduled)
        # what lies between two batches belongs to neither
        seconds = step.total_time if is_opening or self._ended is None else now - self._ended
        asked = [item.max_draft for item in step.scoring if item.max_draft and item.drafter in step.draft_times]
        found = Round(
            seconds=seconds,
            draft_seconds=step.draft_time,
            depth=max(asked, default=0),
            num_asked=len(asked),
            num_drafted=tuple([outcome.num_drafted for outcome in step.outcomes]),
            num_kept=tuple(step.num_kept),
        )
        (self.openings if is_opening else self.rounds).append(found)
        self._ended = now

    def take(self) -> tuple[list[Round], list[Round]]:
        """The openings and the rounds since the last time."""
        taken = self.openings, self.rounds
        self.openings, self.rounds, self._ended = [], [], None
        return taken
