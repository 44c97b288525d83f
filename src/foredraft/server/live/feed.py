"""Looks on at the engine for the live page: counts always, texts and rounds only while somebody watches.

`observe` runs on the engine's thread, everything else on the server's. Between them stand bounded queues with one writer
and one reader, so neither ever waits for the other.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import ScheduledSequence, Step
from foredraft.llm import LLM
from foredraft.trace.format import RoundLine, StepLine
from foredraft.trace.recorder import header_of
from foredraft.trace.rounds import Characters, round_line, step_line

logger = logging.getLogger("foredraft")

SAMPLE_SECONDS = 0.5
NUM_SAMPLES = 240
"""Two minutes of them are kept."""
MAX_WATCHERS = 8
_ROUND_SECONDS = 0.03
_ROUND_SHARE, _ROUND_RESERVE = 0.02, 0.1
"""Rounds are told with their probabilities, which takes time on the engine's thread: at most so often, and over time at most
this share of it. So many seconds may come at once, that a short text has some too."""
_TAIL = 64
_MOST_MET, _MOST_ROUNDS, _MOST_KNOWN = 64, 32, 4096


class Counts(NamedTuple):
    """Up to a moment: what happened between two of them is a difference.

    num_passes, num_asked_*: since the feed looks on; the others as in SpeculationStats, since the engine began.
    num_asked_steps: verified rows for which the policy wanted a draft; num_asked_tokens: the draft tokens it wanted.
    """

    num_passes: int = 0
    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_evaluated_tokens: int = 0
    num_emitted_tokens: int = 0
    num_asked_steps: int = 0
    num_asked_tokens: int = 0


class Sample(NamedTuple):
    """time: seconds since the feed began. cache_*: bytes; retained ones are in use, but given back when they are needed.
    asked: the rows for which a draft was wanted, by drafter. resting: the drafters that are left alone now, and why. fallbacks: how
    often, by drafter and reason."""

    time: float
    counts: Counts
    num_running: int
    num_waiting: int
    cache_used: int
    cache_retained: int
    cache_total: int
    asked: Mapping[str, int]
    cooldowns: Mapping[str, str]
    fallbacks: Mapping[str, int]

    def flat(self) -> dict[str, Any]:
        found = self._asdict()
        return {"time": found.pop("time"), **found.pop("counts")._asdict(), **found}


class Told(NamedTuple):
    """A round, and the step that it was part of."""

    round: RoundLine
    step: StepLine


class LiveFeed:
    """An Observer of an engine's steps, and what is known of that engine.

    show_text: whether watchers see prompts and texts; without it they see of each token only where it came from.
    max_watchers: how many may watch at a time.

    While nobody watches, a step costs a few additions, and every half second a sample. Memory is bounded throughout.
    """

    def __init__(self, *, show_text: bool = True, max_watchers: int = MAX_WATCHERS) -> None:
        self._llm: LLM | None = None
        self.show_text = show_text
        self.max_watchers = max_watchers
        self.samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self.met: deque[TokenSequence] = deque(maxlen=_MOST_MET)
        self.rounds: deque[Told] = deque(maxlen=_MOST_ROUNDS)
        self.is_closed = False
        self.shown: Set[int] = frozenset()
        self._is_watched = False
        self._known: set[int] = set()
        self._latest: Sequence[ScheduledSequence] = ()
        self._began = time.perf_counter()
        self._due = self._ended = 0.0
        self._counts = Counts()
        self._num_passes = self._num_asked_steps = self._num_asked_tokens = 0
        self._asked: Counter[str] = Counter()
        self._allowance = _Allowance(_ROUND_SHARE, _ROUND_RESERVE, _ROUND_SECONDS)
        self._turn = 0

    @contextmanager
    def attached(self, llm: LLM) -> Iterator[None]:
        """Looks on at this model's engine meanwhile, and is closed then."""
        self._llm = llm
        self._counts = self._count()
        llm.engine.observers.append(self)
        try:
            yield
        finally:
            self.close()
            llm.engine.observers.remove(self)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to watch."""
        return self._llm is not None and not self.is_closed

    @property
    def llm(self) -> LLM:
        """Raises RuntimeError before there is one."""
        if self._llm is None:
            raise RuntimeError("the feed looks on at no engine yet: attach one")
        return self._llm

    def observe(self, step: Step) -> None:
        if not step.scheduled or self.is_closed:
            return
        try:
            self._observe(step)
        except Exception:  # whatever it is, no request shall end for it
            logger.exception("the live page has a fault and shows no more")
            self.is_closed = True

    def _observe(self, step: Step) -> None:
        now = time.perf_counter()
        if now - step.total_time - self._ended > SAMPLE_SECONDS:  # a rest lies between: it has an end of its own
            for moment in (self._ended, now - step.total_time):
                self.samples.append(self._sample_at(moment))
        self._num_passes += 1
        for item in step.scoring:
            if item.max_draft:
                self._asked[item.drafter] += 1
                self._num_asked_steps += 1
                self._num_asked_tokens += item.max_draft
        self._counts, self._ended = self._count(), now
        if now >= self._due:
            self._due = now + SAMPLE_SECONDS
            self.samples.append(self._sample_at(now))
        self._latest = step.scheduled
        if self._is_watched:
            self._look(step, now)

    def sample(self) -> Sample:
        """The counts as they are: up to the last step."""
        return self._sample_at(self._ended)

    def _count(self) -> Counts:
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
            max(0.0, round(moment - self._began, 4)),
            self._counts,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            cache_used=engine.pool.used,
            cache_retained=engine.pool.bytes_retained,
            cache_total=engine.pool.total,
            asked=dict(self._asked),
            cooldowns=llm.cooldowns,
            fallbacks={f"{drafter}: {reason}": times for (drafter, reason), times in llm.fallbacks.items()},
        )

    def now(self) -> float:
        """Seconds since the feed began."""
        return round(time.perf_counter() - self._began, 4)

    def watch(self, is_watched: bool) -> None:
        """From now on texts and rounds are told, or not any more. What runs now is met again."""
        self._is_watched = False
        self._known = set()
        self.met.clear()
        self.rounds.clear()
        if is_watched:
            self.met.extend(item.sequence for item in self._latest if not item.sequence.is_finished)
            self._is_watched = True

    def close(self) -> None:
        """Every watcher's stream ends soon; the server is being shut down."""
        self.is_closed = True

    def _look(self, step: Step, now: float) -> None:
        if len(self._known) > _MOST_KNOWN:  # some were aborted, and nobody said so
            self._known = set()
        for item in step.scheduled:
            sequence = item.sequence
            if sequence.seq_id not in self._known:
                self._known.add(sequence.seq_id)
                self.met.append(sequence)
            if sequence.is_finished:
                self._known.discard(sequence.seq_id)
        if self.show_text and self._allowance.may(now):
            rows = [row for row, item in enumerate(step.scoring) if item.sequence.seq_id in self.shown]
            if rows:
                self._turn += 1
                self._tell(step, rows[self._turn % len(rows)], now)

    def _tell(self, step: Step, row: int, now: float) -> None:
        sequence = step.scoring[row].sequence
        before = len(sequence.tokens) - step.num_kept[row]
        characters = Characters(self.llm.tokenizer, sequence.tokens[max(0, before - _TAIL) : before])
        found = round_line(step, row, characters, text=sequence.seq_id, number=self._num_passes)
        start = max(0.0, now - step.total_time - self._began)
        self.rounds.append(Told(found, step_line(step, self._num_passes, start)))
        self._allowance.spend(time.perf_counter() - now)


class _Allowance:
    """Time that may be spent: a share of what goes by, of which so many seconds are kept, and not without a pause."""

    def __init__(self, share: float, reserve: float, pause: float) -> None:
        self._share, self._pause = share, pause
        self._seconds = self._most = reserve
        self._since = self._last = 0.0

    def may(self, now: float) -> bool:
        self._seconds = min(self._most, self._seconds + self._share * (now - self._since))
        self._since = now
        return self._seconds > 0 and now - self._last >= self._pause

    def spend(self, seconds: float) -> None:
        self._seconds -= seconds
        self._last = self._since


def described(llm: LLM) -> dict[str, Any]:
    """What does not change while it runs."""
    header = header_of(llm).model_dump(include={"foredraft", "method", "device", "target", "draft"})
    return header | {"drafters": list(llm.drafters), "speculative_tokens": llm.speculative_tokens}
