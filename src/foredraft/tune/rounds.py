"""What a prediction needs to know about a run: each step's times and counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.engine.step import Step


@dataclass(frozen=True, slots=True)
class Round:
    """One step. Times in seconds.

    seconds: from the end of the previous step of the same batch. draft_seconds: the drafter's share of them. depth: the
    longest draft that was requested. num_asked: sequences with such a request. num_drafted, num_kept: for each sequence, the
    draft tokens that were verified and the tokens that reached the text.
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
        """Rows of the target's pass if at most this many draft tokens had been requested."""
        return len(self.num_drafted) + sum(min(drafted, speculative_tokens) for drafted in self.num_drafted)

    def num_tokens(self, speculative_tokens: int) -> int:
        """Tokens that the texts would have received: accepted draft tokens, and the target's own."""
        return sum(min(kept, speculative_tokens + 1) for kept in self.num_kept)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a group of questions under one setting.

    group: its index. category: of its questions. num_tokens, seconds: of all answers, as a benchmark counts them.
    openings: the steps in which a prompt was read. rounds: all other steps.
    """

    group: int
    num_tokens: int
    seconds: float
    openings: Sequence[Round]
    rounds: Sequence[Round]
    category: str = ""


@dataclass(slots=True)
class Recorder:
    """An observer of an engine. clock: the seconds that the engine has run."""

    clock: Callable[[], float] = time.perf_counter
    openings: list[Round] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    _ended: float | None = None

    def observe(self, step: Step) -> None:
        now = self.clock()
        is_opening = any(item.num_unread != 1 for item in step.scheduled)
        # the time between two batches belongs to neither
        seconds = step.total_time if is_opening or self._ended is None else now - self._ended
        asked = [item.max_draft for item in step.scoring if item.max_draft and item.drafter in step.draft_times]
        current = Round(
            seconds=seconds,
            draft_seconds=step.draft_time,
            depth=max(asked, default=0),
            num_asked=len(asked),
            num_drafted=tuple([outcome.num_drafted for outcome in step.outcomes]),
            num_kept=tuple(step.num_kept),
        )
        (self.openings if is_opening else self.rounds).append(current)
        self._ended = now

    def take(self) -> tuple[list[Round], list[Round]]:
        """The openings and the rounds since the last call."""
        taken = self.openings, self.rounds
        self.openings, self.rounds, self._ended = [], [], None
        return taken
