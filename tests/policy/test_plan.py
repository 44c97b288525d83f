"""The plan that promises the most tokens per second, against trying them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.policy import NO_DRAFTING, DraftBudget
from foredraft.policy.acceptance import Forecast
from foredraft.policy.plan import Candidate, Plan, best_plan

LONGEST = 5
NAMES = ("a", "b")
DOUBT = 1.05
"""Below this gain over plain decoding either answer is right: measurements cannot tell them apart."""


@dataclass(frozen=True)
class Times:
    """A pass: base + row * rows. A drafter: (fixed, per depth, per request)."""

    base: float
    row: float
    drafters: Mapping[str, tuple[float, float, float]]

    def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool) -> float | None:
        return self.base + self.row * num_rows

    def draft_time(self, drafter: str, num_requests: int, depth: int, *, sampled: bool, is_tree: bool = False) -> float:
        fixed, per_depth, per_request = self.drafters[drafter]
        return fixed + per_depth * depth + per_request * num_requests


def forecast(rate: float, fill_rate: float = 1.0) -> Forecast:
    survival, num_tokens = 1.0, [1.0]
    for _ in range(LONGEST):
        survival *= rate
        num_tokens.append(num_tokens[-1] + fill_rate * survival)
    return Forecast(num_tokens, [fill_rate * depth for depth in range(LONGEST + 1)])


def value(candidates: Sequence[Candidate], budgets: Sequence[DraftBudget], times: Times) -> float:
    """Tokens per second, counted by hand."""
    num_tokens = num_rows = seconds = 0.0
    for candidate, budget in zip(candidates, budgets, strict=True):
        one = candidate.forecasts[budget.drafter] if budget.max_draft else Forecast([1.0], [0.0])
        num_tokens += one.num_tokens[budget.max_draft]
        num_rows += 1 + one.num_rows[budget.max_draft]
        seconds += candidate.start_times.get(budget.drafter, 0.0) if budget.max_draft else 0.0
    for name in NAMES:
        depths = [budget.max_draft for budget in budgets if budget.drafter == name and budget.max_draft]
        if depths:
            seconds += times.draft_time(name, len(depths), max(depths), sampled=False)
    pass_time = times.step_time(len(budgets), num_rows, sampled=False)
    assert pass_time is not None
    return num_tokens / (seconds + pass_time)


def planned(candidates: Sequence[Candidate], times: Times) -> Plan:
    plan = best_plan(candidates, times, sampled=False)
    assert plan is not None
    return plan


shares = st.floats(0.0, 1.0)
all_times = st.builds(
    Times,
    st.floats(0.1, 10.0),
    st.floats(0.0, 1.0),
    st.fixed_dictionaries({name: st.tuples(*[st.floats(0.0, 1.0)] * 3) for name in NAMES}),
)
candidates = st.builds(
    Candidate,
    st.integers(0, LONGEST),
    st.fixed_dictionaries({}, optional={name: st.builds(forecast, shares, shares) for name in NAMES}),
    st.fixed_dictionaries({}, optional={name: st.floats(0.0, 0.5) for name in NAMES}),
)


def every_budget(candidate: Candidate) -> list[DraftBudget]:
    return [
        NO_DRAFTING,
        *(DraftBudget(name, g) for name in candidate.forecasts for g in range(1, candidate.max_draft + 1)),
    ]


@given(candidates, all_times)
def test_for_one_it_is_the_best_of_all(candidate: Candidate, times: Times) -> None:
    plan = planned([candidate], times)
    plain = value([candidate], [NO_DRAFTING], times)
    best = max(value([candidate], [budget], times) for budget in every_budget(candidate))
    rate = value([candidate], plan.budgets, times)
    assert plan.rate == pytest.approx(rate)
    assert rate == pytest.approx(best) or (plan.budgets == [NO_DRAFTING] and best <= DOUBT * plain)


@given(st.lists(candidates, min_size=1, max_size=5), all_times)
def test_for_several_never_worse_than_a_draft_for_all_and_never_than_none(
    batch: Sequence[Candidate], times: Times
) -> None:
    plan = planned(batch, times)
    assert plan.rate == pytest.approx(value(batch, plan.budgets, times))
    plain = value(batch, [NO_DRAFTING] * len(batch), times)
    common = [
        [
            DraftBudget(name, min(depth, c.max_draft)) if name in c.forecasts and c.max_draft else NO_DRAFTING
            for c in batch
        ]
        for name in NAMES
        for depth in range(1, LONGEST + 1)
    ]
    best = max(value(batch, budgets, times) for budgets in common)
    assert plan.rate >= plain * (1 - 1e-9)
    assert plan.rate >= best * (1 - 1e-9) or (not any(a.max_draft for a in plan.budgets) and best <= DOUBT * plain)


@given(st.lists(candidates, min_size=1, max_size=5), all_times)
def test_no_budget_exceeds_what_could_be_emitted_or_names_an_unavailable_drafter(
    batch: Sequence[Candidate], times: Times
) -> None:
    for candidate, budget in zip(batch, planned(batch, times).budgets, strict=True):
        assert 0 <= budget.max_draft <= candidate.max_draft
        assert budget == NO_DRAFTING or (budget.max_draft and budget.drafter in candidate.forecasts)


@given(shares, shares, st.floats(0.0, 0.1), st.floats(0.01, 0.3))
def test_two_that_differ_come_close_to_the_best_of_all_pairs(a: float, b: float, row: float, per_depth: float) -> None:
    """Individual budgets are found without trying all pairs; the result must be close to the best."""
    batch = [Candidate(LONGEST, {"a": forecast(rate)}) for rate in (a, b)]
    times = Times(1.0, row, {"a": (0.0, per_depth, 0.0)})
    best = max(value(batch, budgets, times) for budgets in product(*map(every_budget, batch)))
    assert planned(batch, times).rate >= best / 1.06


def test_nothing_is_drafted_where_drafts_cost_more_than_they_bring() -> None:
    candidate = Candidate(LONGEST, {"a": forecast(0.3)})
    assert planned([candidate], Times(1.0, 0.0, {"a": (0.0, 0.5, 0.0)})).budgets == [NO_DRAFTING]
    assert planned([candidate], Times(1.0, 0.5, {"a": (0.0, 0.0, 0.0)})).budgets == [NO_DRAFTING]


def test_what_is_free_and_always_right_is_drafted_to_the_end() -> None:
    candidate = Candidate(LONGEST, {"a": forecast(1.0)})
    assert planned([candidate], Times(1.0, 0.0, {"a": (0.0, 0.0, 0.0)})).budgets == [DraftBudget("a", LONGEST)]


def test_time_decides_and_not_length() -> None:
    """The longer and likelier draft loses to the one that is cheap."""
    candidate = Candidate(LONGEST, {"a": forecast(0.9), "b": forecast(0.6)})
    (budget,) = planned([candidate], Times(1.0, 0.02, {"a": (0.0, 0.4, 0.0), "b": (0.0, 0.0, 0.0)})).budgets
    assert budget.drafter == "b"


def test_reading_up_counts() -> None:
    times = Times(1.0, 0.0, {"a": (0.0, 0.1, 0.0)})
    forecasts = {"a": forecast(0.9)}
    assert planned([Candidate(LONGEST, forecasts)], times).budgets != [NO_DRAFTING]
    assert planned([Candidate(LONGEST, forecasts, {"a": 10.0})], times).budgets == [NO_DRAFTING]


def test_texts_that_differ_get_different_numbers() -> None:
    batch = [Candidate(LONGEST, {"a": forecast(rate)}) for rate in (0.95, 0.02)]
    good, bad = planned(batch, Times(1.0, 0.15, {"a": (0.0, 0.02, 0.0)})).budgets
    assert good.max_draft > bad.max_draft


def test_where_the_targets_time_is_unknown_there_is_no_plan() -> None:
    class Unknown(Times):
        def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool) -> float | None:
            return None

    times = Unknown(1.0, 0.0, {"a": (0.0, 0.0, 0.0)})
    assert best_plan([Candidate(LONGEST, {"a": forecast(1.0)})], times, sampled=False) is None
