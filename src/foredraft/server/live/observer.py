"""Observes the engine for the live page: its counts always, its texts and rounds only while somebody watches.

`observe` runs on the engine's thread, everything else on the server's. Between them are bounded queues with one writer and one
reader, so neither thread waits for the other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import ScheduledSequence, Step
from foredraft.llm import LLM
from foredraft.server.live.samples import Counts, Sample
from foredraft.server.live.time_budget import TimeBudget
from foredraft.trace.format import RoundLine, StepLine
from foredraft.trace.round_lines import TokenDecoder, round_line, step_line

logger = logging.getLogger("foredraft")

SAMPLE_SECONDS = 0.5
NUM_SAMPLES = 240
"""Samples that are kept: two minutes."""
MAX_WATCHERS = 8
_ROUND_SECONDS = 0.03
_ROUND_SHARE, _ROUND_RESERVE = 0.02, 0.1
"""Recording a round computes probabilities on the engine's thread. So rounds are recorded at most every _ROUND_SECONDS and use at
most this share of the time; the reserve, in seconds, lets a short text have some rounds too."""
_CONTEXT_TOKENS = 64
"""Tokens before a round that its characters are decoded with."""
_MAX_NEW_TEXTS, _MAX_ROUNDS, _MAX_KNOWN = 64, 32, 4096


class RecordedRound(NamedTuple):
    """A round, and the step that it was part of."""

    round: RoundLine
    step: StepLine


class LiveObserver:
    """Observes the steps of one engine.

    show_text: whether watchers see prompts and texts; otherwise they only see where each token came from. max_watchers: how many
    may watch at a time.

    samples, new_texts, rounds: queues that the server's thread empties. shown: ids of the sequences whose rounds are recorded.

    While nobody watches, a step costs a few additions, and one sample every half second. Memory is bounded.
    """

    def __init__(self, *, show_text: bool = True, max_watchers: int = MAX_WATCHERS) -> None:
        self._llm: LLM | None = None
        self.show_text = show_text
        self.max_watchers = max_watchers
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self.new_texts: deque[TokenSequence] = deque(maxlen=_MAX_NEW_TEXTS)
        self.rounds: deque[RecordedRound] = deque(maxlen=_MAX_ROUNDS)
        self.is_closed = False
        self.shown: Set[int] = frozenset()
        self._is_watched = False
        self._known: set[int] = set()
        self._last_scheduled: Sequence[ScheduledSequence] = ()
        self._started_at = time.perf_counter()
        self._next_sample_at = self._last_step_at = 0.0
        self._counts = Counts()
        self._num_passes = self._num_asked_steps = self._num_asked_tokens = 0
        self._asked: Counter[str] = Counter()
        self._round_budget = TimeBudget(_ROUND_SHARE, _ROUND_RESERVE, _ROUND_SECONDS)
        self._num_recorded = 0

    @contextmanager
    def attached(self, llm: LLM) -> Iterator[None]:
        """Observe this model's engine inside the block. The observer is closed at its end."""
        self._llm = llm
        self._counts = self._current_counts()
        llm.engine.observers.append(self)
        try:
            yield
        finally:
            self.close()
            llm.engine.observers.remove(self)

    @property
    def is_open(self) -> bool:
        """Whether there is an engine to watch."""
        return self._llm is not None and not self.is_closed

    @property
    def llm(self) -> LLM:
        """Raises RuntimeError before an engine is attached."""
        if self._llm is None:
            raise RuntimeError("the observer has no engine yet: use attached(llm)")
        return self._llm

    def observe(self, step: Step) -> None:
        if not step.scheduled or self.is_closed:
            return
        try:
            self._observe(step)
        except Exception:  # an error here must not end any request
            logger.exception("the live page failed and has been closed")
            self.is_closed = True

    def _observe(self, step: Step) -> None:
        now = time.perf_counter()
        if (
            now - step.total_time - self._last_step_at > SAMPLE_SECONDS
        ):  # the engine was idle: sample both ends of that time
            for moment in (self._last_step_at, now - step.total_time):
                self.samples.append(self._sample_at(moment))
        self._count(step)
        self._counts, self._last_step_at = self._current_counts(), now
        if now >= self._next_sample_at:
            self._next_sample_at = now + SAMPLE_SECONDS
            self.samples.append(self._sample_at(now))
        self._last_scheduled = step.scheduled
        if self._is_watched:
            self._collect_texts(step)
            self._record_round(step, now)

    def _count(self, step: Step) -> None:
        self._num_passes += 1
        for item in step.scoring:
            if item.max_draft:
                self._asked[item.drafter] += 1
                self._num_asked_steps += 1
                self._num_asked_tokens += item.max_draft

    def sample(self) -> Sample:
        """The state after the last step."""
        return self._sample_at(self._last_step_at)

    def _current_counts(self) -> Counts:
        stats = self.llm.engine.stats
        return Counts(
            self._num_passes,
            stats.num_steps,
            stats.num_spec_steps,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            stats.num_evaluated_tokens,
            stats.num_emitted_tokens,
            self._num_asked_steps,
            self._num_asked_tokens,
        )

    def _sample_at(self, moment: float) -> Sample:
        llm, engine = self.llm, self.llm.engine
        return Sample(
            max(0.0, round(moment - self._started_at, 4)),
            self._counts,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            cache_used=engine.pool.used,
            cache_retained=engine.pool.bytes_retained,
            cache_total=engine.pool.total,
            asked=dict(self._asked),
            resting=llm.cooldowns,
            fallbacks={f"{drafter}: {reason}": times for (drafter, reason), times in llm.fallbacks.items()},
        )

    def now(self) -> float:
        """Seconds since the observer was created."""
        return round(time.perf_counter() - self._started_at, 4)

    def set_watched(self, is_watched: bool) -> None:
        """Start or stop collecting texts and rounds. The texts that are running now are collected as new ones."""
        self._is_watched = False
        self._known = set()
        self.new_texts.clear()
        self.rounds.clear()
        if is_watched:
            self.new_texts.extend(item.sequence for item in self._last_scheduled if not item.sequence.is_finished)
            self._is_watched = True

    def close(self) -> None:
        """End every watcher's stream soon, since the server shuts down."""
        self.is_closed = True

    def _collect_texts(self, step: Step) -> None:
        if len(self._known) > _MAX_KNOWN:  # aborted sequences are never seen finished: start over
            self._known = set()
        for item in step.scheduled:
            sequence = item.sequence
            if sequence.seq_id not in self._known:
                self._known.add(sequence.seq_id)
                self.new_texts.append(sequence)
            if sequence.is_finished:
                self._known.discard(sequence.seq_id)

    def _record_round(self, step: Step, now: float) -> None:
        """Record one round of the step, of the shown texts in turn, if the time allows."""
        if not self.show_text or not self._round_budget.allows(now):
            return
        rows = [row for row, item in enumerate(step.scoring) if item.sequence.seq_id in self.shown]
        if not rows:
            return
        self._num_recorded += 1
        row = rows[self._num_recorded % len(rows)]
        sequence = step.scoring[row].sequence
        num_before = len(sequence.tokens) - step.num_kept[row]
        context = sequence.tokens[max(0, num_before - _CONTEXT_TOKENS) : num_before]
        decoder = TokenDecoder(self.llm.tokenizer, context)
        line = round_line(step, row, decoder, text=sequence.seq_id, number=self._num_passes)
        start = max(0.0, now - step.total_time - self._started_at)
        self.rounds.append(RecordedRound(line, step_line(step, self._num_passes, start)))
        self._round_budget.spend(time.perf_counter() - now)
