"""Which drafts give the most tokens per second, from forecasts and costs. No state, no tokens, no clock.

The model of arXiv:2211.17192 with what verification costs: tokens expected, over the time of drafting and of a pass with so
many rows; after the goodput of TurboSpec (arXiv:2406.14066), with zero among the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foredraft.policy.acceptance import Forecast
from foredraft.policy.base import DraftBudget

NOBODY = DraftBudget("", 0)
_WORTH = 1.03
"""Drafting has to promise this much more than plain decoding: below, what is measured cannot tell them apart."""


class TimeModel(Protocol):
    """See Costs."""

    def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool) -> float | None: ...

    def draft_time(self, drafter: str, num_requests: int, depth: int, *, sampled: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one sequence could draft. max_draft: the most that could be emitted. forecasts: by drafter. start_times: what
    reading up would take each drafter, spread over the rounds it is thought to be used for. fixed: what it gets in any
    case, where that is not to be chosen."""

    max_draft: int
    forecasts: Mapping[str, Forecast]
    start_times: Mapping[str, float] = field(default_factory=dict)
    fixed: DraftBudget | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """asks: one for each candidate. num_tokens: expected of the step. seconds: that it is thought to take."""

    budgets: list[DraftBudget]
    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def best_plan(candidates: Sequence[Candidate], times: TimeModel, *, sampled: bool) -> Plan | None:
    """The step of all candidates together that promises the most tokens per second; None where nothing is known of the
    target's times.

    First the best draft that all could take alike, since a drafter reads for all of them in one pass; then each one's own,
    at the price of time which that plan sets.
    """
    model = _Batch(candidates, times, sampled)
    plain = model.plan(model.alike(NOBODY))
    if plain is None:
        return None
    best = plain
    for drafter in model.drafters:
        for depth in range(1, model.max_draft + 1):
            plan = model.plan(model.alike(DraftBudget(drafter, depth)))
            if plan is not None and plan.rate > best.rate:
                best = plan
    if len(candidates) > 1:
        own = model.plan(model.priced(best))
        if own is not None and own.rate > best.rate:
            best = own
    return best if best.rate > _WORTH * plain.rate else plain


class _Batch:
    """The candidates of one step."""

    def __init__(self, candidates: Sequence[Candidate], times: TimeModel, sampled: bool) -> None:
        self._candidates = candidates
        self._times = times
        self._sampled = sampled
        self.drafters = list(dict.fromkeys(name for c in candidates for name in c.forecasts))
        self.max_draft = max((c.max_draft for c in candidates), default=0)

    def alike(self, budget: DraftBudget) -> list[DraftBudget]:
        """The same for all, as far as they can take it."""
        return [self._cut(candidate, budget) for candidate in self._candidates]

    @staticmethod
    def _cut(candidate: Candidate, budget: DraftBudget) -> DraftBudget:
        if candidate.fixed is not None:
            return candidate.fixed
        depth = min(budget.max_draft, candidate.max_draft)
        return DraftBudget(budget.drafter, depth) if depth and budget.drafter in candidate.forecasts else NOBODY

    def plan(self, budgets: list[DraftBudget]) -> Plan | None:
        """None where the target's time is not known."""
        num_tokens, num_rows, start_time = 0.0, 0.0, 0.0
        depths: dict[str, tuple[int, int]] = {}
        for candidate, budget in zip(self._candidates, budgets, strict=True):
            if not budget.max_draft:
                num_tokens += 1.0
                continue
            forecast = candidate.forecasts[budget.drafter]
            num_tokens += forecast.num_tokens[budget.max_draft]
            num_rows += forecast.num_rows[budget.max_draft]
            start_time += candidate.start_times.get(budget.drafter, 0.0)
            count, depth = depths.get(budget.drafter, (0, 0))
            depths[budget.drafter] = (count + 1, max(depth, budget.max_draft))
        size = len(budgets)
        step_time = self._times.step_time(size, size + num_rows, sampled=self._sampled)
        if step_time is None:
            return None
        draft_time = sum(
            self._times.draft_time(name, count, depth, sampled=self._sampled) for name, (count, depth) in depths.items()
        )
        return Plan(budgets, num_tokens, step_time + draft_time + start_time)

    def priced(self, plan: Plan) -> list[DraftBudget]:
        """Each one's best ask where time has the price of the plan: its rate. A draft no deeper than the plan's costs its
        rows alone, since the drafter reads for the others anyway; any other drafter costs all of its time."""
        rate, row_time = plan.rate, self._row_time(plan)
        depths = {budget.drafter: budget.max_draft for budget in plan.budgets if budget.max_draft}
        draft_times = {
            (name, depth): 0.0
            if depth <= depths.get(name, 0)
            else self._times.draft_time(name, 1, depth, sampled=self._sampled)
            for name in self.drafters
            for depth in range(1, self.max_draft + 1)
        }
        return [self._own(candidate, rate, row_time, draft_times) for candidate in self._candidates]

    @staticmethod
    def _own(
        candidate: Candidate, rate: float, row_time: float, draft_times: Mapping[tuple[str, int], float]
    ) -> DraftBudget:
        if candidate.fixed is not None:
            return candidate.fixed
        best, worth = NOBODY, 1.0
        for name, forecast in candidate.forecasts.items():
            start = candidate.start_times.get(name, 0.0)
            for depth in range(1, candidate.max_draft + 1):
                seconds = row_time * forecast.num_rows[depth] + draft_times[name, depth] + start
                value = forecast.num_tokens[depth] - rate * seconds
                if value > worth:
                    best, worth = DraftBudget(name, depth), value
        return best

    def _row_time(self, plan: Plan) -> float:
        """What one more row adds to the pass, about where the plan stands."""
        size = len(plan.budgets)
        num_rows = size + sum(
            candidate.forecasts[budget.drafter].num_rows[budget.max_draft]
            for candidate, budget in zip(self._candidates, plan.budgets, strict=True)
            if budget.max_draft
        )
        low, high = max(size, num_rows - size), num_rows + size
        below = self._times.step_time(size, low, sampled=self._sampled)
        above = self._times.step_time(size, high, sampled=self._sampled)
        assert below is not None
        assert above is not None
        return max((above - below) / (high - low), 0.0)
