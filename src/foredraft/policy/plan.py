"""Finds the drafts that give the most tokens per second, from forecasts and costs. It keeps no state and reads no tokens.

The model of arXiv:2211.17192 with a cost for verification: expected tokens, divided by the time of drafting and of a pass with
that many rows. This is the goodput of TurboSpec (arXiv:2406.14066), with zero among the lengths to choose from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foredraft.policy.acceptance import Forecast
from foredraft.policy.base import NO_DRAFTING, DraftBudget

_MIN_GAIN = 1.03
"""Drafting must promise this much more than plain decoding. Below it, measurements cannot tell the two apart."""


class TimeModel(Protocol):
    """See CostModel."""

    def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool) -> float | None: ...

    def draft_time(self, drafter: str, num_requests: int, depth: int, *, sampled: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one sequence could draft. max_draft: the most tokens that could be emitted. forecasts: by drafter. start_times:
    by drafter, the time to read what it has missed, spread over the steps it is expected to be used for. fixed: the budget
    of a sequence whose budget is not to be chosen."""

    max_draft: int
    forecasts: Mapping[str, Forecast]
    start_times: Mapping[str, float] = field(default_factory=dict)
    fixed: DraftBudget | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """budgets: one for each candidate. num_tokens, seconds: expected of the step."""

    budgets: list[DraftBudget]
    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def best_plan(candidates: Sequence[Candidate], times: TimeModel, *, sampled: bool) -> Plan | None:
    """The plan with the most expected tokens per second over all candidates; None if the target's times are unknown.

    First it finds the best budget that is the same for all, since a drafter reads for all of them in one pass. Then it finds
    each candidate's own best budget, with that plan's rate as the price of time.
    """
    batch = _Batch(candidates, times, sampled)
    plain = batch.plan(batch.uniform_budgets(NO_DRAFTING))
    if plain is None:
        return None
    best = plain
    for drafter in batch.drafters:
        for depth in range(1, batch.max_draft + 1):
            plan = batch.plan(batch.uniform_budgets(DraftBudget(drafter, depth)))
            if plan is not None and plan.rate > best.rate:
                best = plan
    if len(candidates) > 1:
        refined = batch.plan(batch.individual_budgets(best))
        if refined is not None and refined.rate > best.rate:
            best = refined
    return best if best.rate > _MIN_GAIN * plain.rate else plain


class _Batch:
    """The candidates of one step."""

    def __init__(self, candidates: Sequence[Candidate], times: TimeModel, sampled: bool) -> None:
        self._candidates = candidates
        self._times = times
        self._sampled = sampled
        self.drafters = list(dict.fromkeys(name for c in candidates for name in c.forecasts))
        self.max_draft = max((c.max_draft for c in candidates), default=0)

    def uniform_budgets(self, budget: DraftBudget) -> list[DraftBudget]:
        """The same budget for all, limited to what each can take."""
        return [self._limited(candidate, budget) for candidate in self._candidates]

    @staticmethod
    def _limited(candidate: Candidate, budget: DraftBudget) -> DraftBudget:
        if candidate.fixed is not None:
            return candidate.fixed
        depth = min(budget.max_draft, candidate.max_draft)
        return DraftBudget(budget.drafter, depth) if depth and budget.drafter in candidate.forecasts else NO_DRAFTING

    def plan(self, budgets: list[DraftBudget]) -> Plan | None:
        """The expected tokens and time of these budgets; None if the target's time is unknown."""
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

    def individual_budgets(self, plan: Plan) -> list[DraftBudget]:
        """Each candidate's best budget, where a second costs as many tokens as the plan emits in one. A draft no deeper than
        the plan's costs only its rows, since the drafter runs for the others anyway; any other draft costs all its time."""
        rate, row_time = plan.rate, self._row_time(plan)
        depths = {budget.drafter: budget.max_draft for budget in plan.budgets if budget.max_draft}
        draft_times = {
            (name, depth): 0.0
            if depth <= depths.get(name, 0)
            else self._times.draft_time(name, 1, depth, sampled=self._sampled)
            for name in self.drafters
            for depth in range(1, self.max_draft + 1)
        }
        return [self._best_budget(candidate, rate, row_time, draft_times) for candidate in self._candidates]

    @staticmethod
    def _best_budget(
        candidate: Candidate, rate: float, row_time: float, draft_times: Mapping[tuple[str, int], float]
    ) -> DraftBudget:
        if candidate.fixed is not None:
            return candidate.fixed
        best, best_value = NO_DRAFTING, 1.0
        for name, forecast in candidate.forecasts.items():
            start = candidate.start_times.get(name, 0.0)
            for depth in range(1, candidate.max_draft + 1):
                seconds = row_time * forecast.num_rows[depth] + draft_times[name, depth] + start
                value = forecast.num_tokens[depth] - rate * seconds
                if value > best_value:
                    best, best_value = DraftBudget(name, depth), value
        return best

    def _row_time(self, plan: Plan) -> float:
        """The time that one more row adds to the pass, near the plan's number of rows."""
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
