"""Draft as much as pays, down to nothing: measure what steps and drafts cost and earn, and plan by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.policy.acceptance import Acceptance, TextRecord
from foredraft.policy.base import DOES_NOT_PAY, DraftBudget, Pause
from foredraft.policy.choice import NOBODY, Candidate, best_plan
from foredraft.policy.costs import Costs
from foredraft.policy.probes import Probes

_PLAN_SECONDS = 0.02
_SOONEST, _LATEST = 2, 64
"""A plan takes some 50 microseconds, so one is made every 20 milliseconds: on a small model that is 50 steps, on a large one
the next. Bounds in rounds."""
_PLAN_PAUSE = 150
"""For many texts it takes longer, and comes as much more seldom: so many times what it takes lie between two."""
_PLAN_TIME_RATE = 0.1
_HORIZON = 64
_PROBE_DEPTH = 2
_PLAIN_AGE = 256
_PLAN_ROUNDS = 1024
_FEWEST_DRAFTS, _MOST_DRAFTS, _NEWS = 4, 64, 1 / 8
"""A plan is good for so many rounds, or until so many more drafts have come back: a share of all so far, within bounds."""
_MOST_KEPT = 4096
"""Plans that are kept, times the texts of one: of many texts a plan takes a quarter of a kilobyte each."""
_FIRST_SAVE = 256


class CostStore(Protocol):
    """Keeps costs from one process to the next."""

    def save(self, costs: Costs) -> None: ...


@dataclass(slots=True)
class _Text:
    """One sequence: what is asked for it now, and its record under each drafter."""

    records: dict[str, TextRecord]
    budget: DraftBudget = NOBODY


_State = tuple[int, bool, tuple[tuple[int, int], ...]]
"""All that a plan depends on of one text: the most it may draft, whether that is what it gets in any case, and for each
drafter the mood and the magnitude of what it would have to read first."""


class Controller:
    """Chooses drafter and number of draft tokens for every sequence, zero included, by expected tokens per second of the
    whole batch (choice.py), from times that it measures (costs.py) and acceptance that it counts (acceptance.py).

    drafters: names; the first one serves requests that ask for a number of their own. max_draft: the most draft tokens of
    a step. costs: what an earlier process has measured. store: where to keep them. clock: seconds, for what deciding takes.

    Nothing it looks at depends on the draft tokens of the step it plans, so it cannot bias the text. Probes of a drafter
    that does not seem to pay cost at most 1 % of the time (probes.py).
    """

    def __init__(
        self,
        drafters: Sequence[str],
        *,
        max_draft: int = 8,
        costs: Costs | None = None,
        store: CostStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = costs or Costs()
        self.acceptance = {name: Acceptance(max_draft) for name in drafters}
        self._first = drafters[0]
        self._max_draft = max_draft
        self._store = store
        self._clock = clock
        self._save_at = _FIRST_SAVE
        self._pause = Pause()
        self.fallbacks = self._pause.counts
        self._drafting: frozenset[str] = frozenset()
        self._probes = Probes(drafters)
        self._probe_costs = dict.fromkeys(drafters, 0.0)
        self._probing: str | None = None
        self._texts: dict[int, _Text] = {}
        self._round = 0
        self._next_plan = 0
        self._num_planned = 0
        self._plans: dict[tuple[bool, tuple[_State, ...]], tuple[int, int, list[DraftBudget]]] = {}
        self._num_drafts = 0
        self._plain_at: dict[tuple[int, bool], int] = {}
        self._wants_plain = False
        self._step_time = 0.0
        self._plan_time = 0.0
        self._interval = _SOONEST
        self._last_asked: Set[str] = frozenset()

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._round += 1
        self._pause.begin()
        if running and (self._round >= self._next_plan or len(running) != self._num_planned):
            started = self._clock()
            self._replan(running)
            seconds = self._clock() - started
            self._probes.plan(seconds)
            self._plan_time += _PLAN_TIME_RATE * (seconds - self._plan_time)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        if sequence.speculative_tokens is not None:
            return self._own_ask(sequence)
        most = sequence.max_len - len(sequence.tokens) - 1
        text = self._texts.get(sequence.seq_id)
        if text is None:
            text = self._text_of(sequence)
            self._plan([sequence])
            self._num_planned += 1
        budget = text.budget
        return budget if budget.max_draft <= most or budget is NOBODY else DraftBudget(budget.drafter, max(most, 0))

    def observe(self, step: Step) -> None:
        self._step_time = step.total_time
        self._probes.pass_time(step.total_time, len(step.scheduled))
        asked = step.draft_times.keys()
        if not asked:
            self._measure_reading(step)
        if asked or self._wants_plain or self._round % self._interval == 0:
            self._measure(step)
        self._last_asked = asked
        if asked:
            self._count(step)
        for item in step.scoring:
            if item.sequence.is_finished and self._texts.pop(item.sequence.seq_id, None) is not None:
                self._num_planned -= 1

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        new = self._pause.start(drafters, reason, num_steps)
        for text in self._texts.values():
            for name in drafters:
                text.records[name].num_read = 0
        self._plans.clear()
        self._next_plan = 0
        return new

    def _own_ask(self, sequence: TokenSequence) -> DraftBudget:
        """Of one with a number of its own."""
        wanted = min(sequence.speculative_tokens or 0, sequence.room - 1)
        return DraftBudget(self._first, wanted) if wanted > 0 and self._first not in self._pause else NOBODY

    def cooldowns(self) -> dict[str, str]:
        return self._pause.cooldowns()

    def _text_of(self, sequence: TokenSequence) -> _Text:
        """What is known of it; of one with a number of its own that may begin with its first draft."""
        text = self._texts.get(sequence.seq_id)
        if text is None:
            text = self._texts[sequence.seq_id] = _Text({name: TextRecord() for name in self.acceptance})
        return text

    def _replan(self, running: Sequence[TokenSequence]) -> None:
        if len(self._texts) > 2 * len(running) + 8:  # some were aborted, and nobody said so
            here = {sequence.seq_id for sequence in running}
            self._texts = {seq_id: text for seq_id, text in self._texts.items() if seq_id in here}
        self._num_planned = len(running)
        self._probing = None
        known = [s for s in running if s.speculative_tokens is None and s.seq_id in self._texts]
        if known:
            self._plan(known, [s for s in running if s.speculative_tokens is not None])
        drafts = any(self._texts[s.seq_id].budget.max_draft for s in known)
        if known and not self._wants_plain:
            self._count_fallbacks(known)
        if not drafts and not self._wants_plain:
            self._probe(known)
        if self._wants_plain or self._probing is not None or (drafts and len(known) == 1):
            self._next_plan = self._round + 1
        else:
            pause = max(_PLAN_SECONDS, _PLAN_PAUSE * self._plan_time)
            self._interval = min(max(int(pause / max(self._step_time, 1e-6)), _SOONEST), _LATEST)
            self._next_plan = self._round + self._interval

    def _plan(self, sequences: Sequence[TokenSequence], others: Sequence[TokenSequence] = ()) -> None:
        """Give each of these its ask; others get what they asked for. What a plain step takes is measured before anything is
        drafted, where there can be one."""
        everybody = [*sequences, *others]
        sampled = _samples(everybody)
        self._wants_plain = not others and self._lacks_plain(len(sequences), sampled)
        budgets = [NOBODY] * len(sequences) if self._wants_plain else self._budgets(everybody, sampled)
        for sequence, budget in zip(sequences, budgets, strict=False):
            self._texts[sequence.seq_id].budget = budget

    def _count_fallbacks(self, sequences: Sequence[TokenSequence]) -> None:
        """Whoever drafted for the texts that ran before, and is not asked for any that run now."""
        budgets = (self._texts[sequence.seq_id].budget for sequence in sequences)
        drafting = frozenset(budget.drafter for budget in budgets if budget.max_draft)
        if not drafting:
            self.fallbacks.update((name, DOES_NOT_PAY) for name in self._drafting if name not in self._pause)
        self._drafting = drafting

    def _lacks_plain(self, num_sequences: int, sampled: bool) -> bool:
        """Whether the figure that drafting is judged by is missing, or old."""
        measured_at = self._plain_at.get((num_sequences, sampled))
        if measured_at is not None and self._round - measured_at > _PLAIN_AGE:
            return True
        return not self.costs.knows_plain(num_sequences, sampled=sampled)

    def _budgets(self, sequences: Sequence[TokenSequence], sampled: bool) -> list[DraftBudget]:
        """The best plan; for texts in the same state it is what it was a moment ago."""
        key = sampled, tuple([self._state(sequence) for sequence in sequences])
        known = self._plans.get(key)
        if known is not None and self._round <= known[0] and self._num_drafts <= known[1]:
            return known[2]
        if len(self._plans) * len(sequences) > _MOST_KEPT:
            self._plans.clear()
        plan = best_plan([self._candidate(state) for state in key[1]], self.costs, sampled=sampled)
        budgets = [NOBODY] * len(sequences) if plan is None else plan.budgets
        num_more = min(max(int(_NEWS * self._num_drafts), _FEWEST_DRAFTS), _MOST_DRAFTS)
        self._plans[key] = self._round + _PLAN_ROUNDS, self._num_drafts + num_more, budgets
        return budgets

    def _state(self, sequence: TokenSequence) -> _State:
        length, now = len(sequence.tokens), self._round
        records = self._text_of(sequence).records.values()
        is_fixed = sequence.speculative_tokens is not None
        most = min(self._max_draft, self._own_ask(sequence).max_draft if is_fixed else max(sequence.room - 1, 0))
        return most, is_fixed, tuple([(record.mood(now), _magnitude(length - record.num_read)) for record in records])

    def _candidate(self, state: _State) -> Candidate:
        max_draft, is_fixed, records = state
        num_rounds = _HORIZON / 2
        forecasts, start_times = {}, {}
        for (name, acceptance), (mood, missed) in zip(self.acceptance.items(), records, strict=True):
            if name not in self._pause:
                forecasts[name] = acceptance.forecast(mood)
                start_times[name] = self.costs.reading_time(name, _size(missed)) / num_rounds
        if is_fixed:
            return Candidate(0, forecasts, fixed=DraftBudget(self._first, max_draft) if max_draft else NOBODY)
        return Candidate(max_draft, forecasts, start_times)

    def _probe(self, sequences: Sequence[TokenSequence]) -> None:
        """Ask a drafter for one sequence, if its account allows that: the one with the least to read up."""
        names = [
            name
            for name in self.acceptance
            if name not in self._pause and self._probes.may(name, self._probe_costs[name])
        ]
        ready = [s for s in sequences if s.room > _PROBE_DEPTH] if names else []
        if not ready:
            return
        sampled = _samples(sequences)
        row_time = self._row_time(len(sequences), sampled)
        for name in names:
            missed, sequence = min(((self._missed(s, name), s) for s in ready), key=lambda pair: pair[0])
            seconds = self.costs.draft_time(name, 1, _PROBE_DEPTH, sampled=sampled) + row_time
            seconds += self.costs.reading_time(name, missed)
            self._probe_costs[name] = 0.8 * seconds
            if self._probes.may(name, seconds):
                self._texts[sequence.seq_id].budget = DraftBudget(name, _PROBE_DEPTH)
                self._probing = name
                return

    def _missed(self, sequence: TokenSequence, drafter: str) -> int:
        """Tokens that came while the drafter was not asked, a prompt for instance: it would have to read them first."""
        return len(sequence.tokens) - self._text_of(sequence).records[drafter].num_read

    def _row_time(self, num_sequences: int, sampled: bool) -> float:
        """What a probe's rows add to a pass."""
        with_rows = self.costs.step_time(num_sequences, num_sequences + _PROBE_DEPTH, sampled=sampled)
        without = self.costs.step_time(num_sequences, num_sequences, sampled=sampled)
        return max((with_rows or 0.0) - (without or 0.0), 0.0)

    def _measure_reading(self, step: Step) -> None:
        """Of prompts: what many rows take, before any draft has been verified."""
        num_rows = sum([item.num_unread for item in step.scheduled])
        if num_rows > len(step.scheduled):
            self.costs.record_reading(num_rows, step.total_time)

    def _measure(self, step: Step) -> None:
        """Only steps that follow one of their kind: the first after others runs code and reads memory that is not at hand,
        and takes half as long again."""
        sampled = _samples([item.sequence for item in step.scoring])
        num_sequences = len(step.scheduled)
        is_usual = step.draft_times.keys() == self._last_asked
        if len(step.scoring) != num_sequences or any(item.num_unread != 1 for item in step.scheduled):
            is_usual = False
        if is_usual:
            seconds = step.total_time - step.draft_time
            self.costs.record_step(num_sequences, step.num_rows, seconds, sampled=sampled)
            if step.num_rows == num_sequences:
                self._plain_at[num_sequences, sampled] = self._round
        for name, seconds in step.draft_times.items():
            asked = [
                (item, kept)
                for item, kept in zip(step.scoring, step.num_kept, strict=True)
                if item.drafter == name and item.max_draft
            ]
            num_missed = sum(self._missed(item.sequence, name) - kept for item, kept in asked)  # before the step
            if is_usual or num_missed:
                depth = max(item.max_draft for item, _ in asked)
                self.costs.record_draft(name, len(asked), depth, num_missed, seconds, sampled=sampled)
        if self._probing is not None and self._probing in step.draft_times:
            plain = self.costs.plain_time(num_sequences, sampled=sampled) or step.total_time
            num_gained = sum(step.num_kept) - len(step.num_kept)
            added = step.total_time - plain * (1 + num_gained / num_sequences)
            self._probes.spend(self._probing, added, num_gained)
        if self._store is not None and self.costs.num_samples >= self._save_at:
            self._save_at *= 2
            self._store.save(self.costs)

    def _count(self, step: Step) -> None:
        for item, outcome, num_kept in zip(step.scoring, step.outcomes, step.num_kept, strict=True):
            if not item.max_draft:
                continue
            sequence = item.sequence
            record = self._text_of(sequence).records[item.drafter]
            num_accepted = min(outcome.num_accepted, num_kept)
            acceptance, mood = self.acceptance[item.drafter], record.mood(self._round)
            self._num_drafts += 1
            record.record(item.max_draft, num_accepted, self._round, acceptance.usual)
            acceptance.record(mood, item.max_draft, outcome.num_drafted, num_accepted)
            record.num_read = len(sequence.tokens)


def _samples(sequences: Sequence[TokenSequence]) -> bool:
    """Whether any of them draws its tokens: such steps have costs of their own."""
    return any(not sequence.sampler.is_greedy for sequence in sequences)


def _magnitude(num_tokens: int) -> int:
    """0 for fewer than 32, which are read in a pass that is made anyway; 1 for up to 127, 2 for up to 511, and so on."""
    return ((num_tokens >> 5).bit_length() + 1) // 2


def _size(magnitude: int) -> int:
    """About so many tokens."""
    return 16 << 2 * magnitude if magnitude else 0
