"""The policy behind "auto": measures what steps and drafts cost and gain, and drafts as long as that is faster, down to nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Protocol

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Outcome, ScheduledSequence, Step, num_counted
from foredraft.engine.token_tree import TreeShape
from foredraft.policy.acceptance import AcceptanceEstimator, AcceptanceHistory
from foredraft.policy.base import DOES_NOT_PAY, NO_DRAFTING, Cooldowns, DraftBudget, Hybrid
from foredraft.policy.budget_planner import BudgetPlanner
from foredraft.policy.controller_state import ControllerState
from foredraft.policy.cost_model import CostModel
from foredraft.policy.cost_recorder import CostRecorder, is_sampled
from foredraft.policy.plan_schedule import PlanSchedule
from foredraft.policy.probes import ProbeBudget
from foredraft.policy.sequence_state import SequenceStates
from foredraft.policy.tree_acceptance import TreeEstimator

_PROBE_DEPTH = 2
_FIRST_SAVE = 256
"""After how many measured steps the state is stored first. Each next time comes after twice as many."""


class StateStore(Protocol):
    """Keeps the state for later processes."""

    def save(self, state: ControllerState) -> None: ...


class Controller:
    """Chooses a drafter and a draft (or no draft) for every sequence, to maximise the expected tokens per second of the whole batch
    (plan.py), from measured times (cost_model.py) and counted acceptance (acceptance.py, tree_acceptance.py).

    drafters: names; the first one serves requests with a number of draft tokens of their own. max_draft: the most draft tokens that
    it chooses for a step. shape: of the drafts of such requests. tree_drafters: the drafters that may draft trees where that is
    faster. hybrid: if one of the drafters is one.
    state: of an earlier process. store: saves the state now and then. clock: in seconds; it times planning.

    Nothing that it reads depends on the draft tokens of the step it plans, so it cannot bias the text. Probes of drafters that do
    not seem to be worth their time take at most 1 % of the time (probes.py).
    """

    def __init__(
        self,
        drafters: Sequence[str],
        *,
        max_draft: int = 8,
        shape: TreeShape | None = None,
        tree_drafters: Sequence[str] = (),
        hybrid: Hybrid | None = None,
        state: ControllerState | None = None,
        store: StateStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = CostModel(None if state is None else state.costs)
        self._acceptance = {name: AcceptanceEstimator(max_draft) for name in drafters}
        self._trees = {name: TreeEstimator(self._acceptance[name]) for name in tree_drafters}
        if state is not None:
            self._restore(state)
        self._store = store
        self._save_at = _FIRST_SAVE
        self._clock = clock
        self._cooldowns = Cooldowns()
        self.fallbacks = self._cooldowns.counts
        self._states = SequenceStates(drafters)
        self._planner = BudgetPlanner(
            self._acceptance,
            self._trees,
            self.costs,
            self._states,
            self._cooldowns,
            max_draft,
            shape,
            hybrid,
        )
        self._schedule = PlanSchedule()
        self._recorder = CostRecorder(self.costs, self._states)
        self._probes = ProbeBudget(drafters)
        self._probe_costs = dict.fromkeys(drafters, 0.0)
        self._probed: str | None = None
        self._active: frozenset[str] = frozenset()
        self._lookups = frozenset() if hybrid is None else frozenset({hybrid.lookup})
        self._needs_plain_step = False
        self._step = 0
        self._batch_size = 0

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._step += 1
        self._batch_size = len(running)
        self._cooldowns.next_step()
        if running and self._schedule.is_due(self._step):
            started = self._clock()
            self._replan(running)
            seconds = self._clock() - started
            self._probes.add_planning(seconds)
            self._schedule.record_plan(seconds)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        if sequence.speculative_tokens is not None:
            return self._planner.fixed_budget(sequence)
        state = self._states.known(sequence)
        if state is None:
            self._batch_size += 1
            self._plan_joining(sequence)
            state = self._states.of(sequence)
        budget, most = state.budget, sequence.room - 1
        return budget if budget.max_draft <= most else budget._replace(max_draft=max(most, 0))

    def observe(self, step: Step) -> None:
        self._schedule.record_step(step.total_time)
        self._probes.add_step(step.total_time, len(step.scheduled))
        has_drafts = bool(step.draft_times)
        if not has_drafts:
            self._recorder.record_prefill(step)
        if has_drafts or self._needs_plain_step or self._step % self._schedule.interval == 0:
            self._recorder.record(step, self._step)
            self._charge_probe(step)
            self._save_sometimes()
        self._recorder.finish_step(step)
        if has_drafts:
            self._count_acceptance(step)
        for item in step.scoring:
            if item.sequence.is_finished:
                self._states.remove(item.sequence)

    def state(self) -> ControllerState:
        """What a later process can start from."""
        chains = {name: acceptance.levels() for name, acceptance in self._acceptance.items()}
        trees = {name: acceptance.levels() for name, acceptance in self._trees.items()}
        return ControllerState(self.costs.known(), chains, trees)

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        new = self._cooldowns.start(drafters, reason, num_steps)
        self._states.forget_reads(drafters)
        self._planner.clear()
        self._schedule.expire()
        return new

    def cooldowns(self) -> dict[str, str]:
        return self._cooldowns.reasons()

    def _restore(self, state: ControllerState) -> None:
        for name, acceptance in self._acceptance.items():
            acceptance.restore(state.chains.get(name, []))
        for name, trees in self._trees.items():
            trees.restore(state.trees.get(name, []))

    def _save_sometimes(self) -> None:
        if self._store is not None and self.costs.num_samples >= self._save_at:
            self._save_at *= 2
            self._store.save(self.state())

    def _replan(self, running: Sequence[TokenSequence]) -> None:
        self._states.prune(running)
        self._probed = None
        sequences = [s for s in running if s.speculative_tokens is None and s in self._states]
        if sequences:
            self._plan(sequences, [s for s in running if s.speculative_tokens is not None])
        active = self._planned_drafters(sequences)
        if not self._needs_plain_step:
            if sequences:
                self._count_fallbacks(active)
            if active <= self._lookups:
                self._start_probe(sequences, active)
        at_once = self._needs_plain_step or self._probed is not None or (bool(active) and len(sequences) == 1)
        self._schedule.set_next(self._step, at_once=at_once)

    def _plan(self, sequences: Sequence[TokenSequence], fixed: Sequence[TokenSequence] = ()) -> None:
        """Set the budgets of `sequences`. fixed: the other sequences of the batch, with budgets of their own. If there are none, the
        time of a plain step is measured before anything is drafted."""
        batch = [*sequences, *fixed]
        sampled = is_sampled(batch)
        self._needs_plain_step = not fixed and self._recorder.needs_plain_step(len(batch), self._step, sampled=sampled)
        if self._needs_plain_step:
            budgets = [NO_DRAFTING] * len(batch)
        else:
            budgets = self._planner.budgets(batch, self._step, sampled=sampled)
        for sequence, budget in zip(sequences, budgets, strict=False):
            self._states.of(sequence).budget = budget

    def _plan_joining(self, sequence: TokenSequence) -> None:
        """Set the budget that a new sequence has until the next plan: as if all the others were like it."""
        if self._batch_size == 1:
            self._plan([sequence])
            return
        sampled = is_sampled([sequence])
        budget = self._planner.budget_among_equals(sequence, self._batch_size, self._step, sampled=sampled)
        self._states.of(sequence).budget = budget

    def _planned_drafters(self, sequences: Sequence[TokenSequence]) -> frozenset[str]:
        budgets = (self._states.of(sequence).budget for sequence in sequences)
        return frozenset(budget.drafter for budget in budgets if budget.max_draft)

    def _count_fallbacks(self, active: frozenset[str]) -> None:
        """Count a fallback of each drafter that the last plan used, if this plan uses none. active: those that it uses."""
        if not active:
            self.fallbacks.update((name, DOES_NOT_PAY) for name in self._active if name not in self._cooldowns)
        self._active = active

    def _start_probe(self, sequences: Sequence[TokenSequence], active: frozenset[str]) -> None:
        """Probe a drafter that is not active, if its probe budget allows that, on the sequence with the fewest tokens that it has to read
        first."""
        names = [
            name
            for name in self._acceptance
            if name not in active and self._planner.may_use(name) and self._probes.allows(name, self._probe_costs[name])
        ]
        candidates = [s for s in sequences if s.room > _PROBE_DEPTH] if names else []
        if not candidates:
            return
        sampled = is_sampled(sequences)
        row_time = self._probe_row_time(len(sequences), sampled)
        for name in names:
            pairs = ((self._states.num_missed(s, name), s) for s in candidates)
            num_missed, sequence = min(pairs, key=lambda pair: pair[0])
            seconds = self.costs.draft_time(name, 1, _PROBE_DEPTH, sampled=sampled) + row_time
            seconds += self.costs.reading_time(name, num_missed)
            self._probe_costs[name] = 0.8 * seconds
            if self._probes.allows(name, seconds):
                self._states.of(sequence).budget = DraftBudget(name, _PROBE_DEPTH)
                self._probed = name
                return

    def _probe_row_time(self, num_sequences: int, sampled: bool) -> float:
        """The time that a probe's rows add to a pass."""
        with_rows = self.costs.step_time(num_sequences, num_sequences + _PROBE_DEPTH, sampled=sampled)
        without = self.costs.step_time(num_sequences, num_sequences, sampled=sampled)
        return max((with_rows or 0.0) - (without or 0.0), 0.0)

    def _charge_probe(self, step: Step) -> None:
        if self._probed is None or self._probed not in step.draft_times:
            return
        num_sequences = len(step.scheduled)
        sampled = is_sampled([item.sequence for item in step.scoring])
        plain_time = self.costs.plain_time(num_sequences, sampled=sampled) or step.total_time
        num_gained = sum(step.num_kept) - len(step.num_kept)
        added = step.total_time - plain_time * (1 + num_gained / num_sequences)
        self._probes.spend(self._probed, added, num_gained)

    def _count_acceptance(self, step: Step) -> None:
        for item, outcome, num_kept in zip(step.scoring, step.outcomes, step.num_kept, strict=True):
            if not item.max_draft:
                continue
            self._planner.add_draft()
            history = self._states.of(item.sequence).histories[item.drafter]
            if item.shape is None:
                self._count_chain(item, history, outcome, num_kept)
            elif item.drafter in self._trees:
                self._count_tree(item, item.shape, history, outcome, num_kept)
            history.num_read = len(item.sequence.tokens)

    def _count_chain(
        self, item: ScheduledSequence, history: AcceptanceHistory, outcome: Outcome, num_kept: int
    ) -> None:
        num_accepted = min(outcome.num_accepted, num_kept)
        acceptance, bucket = self._acceptance[item.drafter], history.bucket(self._step)
        history.record(num_accepted, min(item.max_draft, num_accepted + 1), self._step, acceptance)
        acceptance.record(bucket, item.max_draft, num_counted(item, outcome), num_accepted)

    def _count_tree(
        self, item: ScheduledSequence, shape: TreeShape, history: AcceptanceHistory, outcome: Outcome, num_kept: int
    ) -> None:
        """Count a tree. If a chain would have had the same first children, count those as a chain too."""
        acceptance, bucket = self._acceptance[item.drafter], history.bucket(self._step)
        ranks, shape = outcome.ranks[:num_kept], shape.cut(item.max_draft)
        # nodes that were wanted but not drafted count as rejected; a drafter that has moved rows may have drafted more
        pairs = zip_longest(shape.fans(ranks), outcome.fans[: num_kept + 1], fillvalue=0)
        fans = [max(pair) for pair in pairs]
        history.record(ranks.count(0), len(fans), self._step, acceptance)
        self._trees[item.drafter].record(bucket, fans, ranks, len(shape), num_counted(item, outcome))
        if not item.sequence.sampler.draws:
            length = shape.first_branch
            num_first = next((place for place, rank in enumerate(ranks) if rank), len(ranks))
            acceptance.record(bucket, length, length if outcome.num_drafted else 0, min(num_first, length))
