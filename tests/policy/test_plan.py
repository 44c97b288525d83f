"""The plan with the most expected tokens per second, compared with an exhaustive search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.token_tree import TreeShape
from foredraft.policy import NO_DRAFTING, DraftBudget
from foredraft.policy.acceptance import Forecast
from foredraft.policy.plan import Candidate, Plan, best_plan
from foredraft.policy.tree_acceptance import TreeForecast, best_first

LONGEST = 5
NAMES = ("a", "b")
DOUBT = 1.05
"""If the gain over plain decoding is below this factor, either answer is right: measurements cannot tell them apart."""


@dataclass(frozen=True)
class Times:
    """A pass takes base + row * rows, and tree_factor times that with a tree. A drafter takes (fixed, per depth, per request)."""

    base: float
    row: float
    drafters: Mapping[str, tuple[float, float, float]]

    tree_factor: float = 1.0

    def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool, is_tree: bool = False) -> float | None:
        return (self.base + self.row * num_rows) * (self.tree_factor if is_tree else 1.0)

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
    """The expected tokens per second of a plan, computed directly."""
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


def planned(candidates: Sequence[Candidate], times: Times, asked_first: str | None = None) -> Plan:
    plan = best_plan(candidates, times, sampled=False, asked_first=asked_first)
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


def with_trees(rate: float, siblings: Sequence[float]) -> Candidate:
    """A candidate whose first children all have this acceptance rate, with trees of depths up to 3."""
    trees = {}
    for max_depth in (1, 2, 3):
        parents, chances = best_first([rate] * max_depth, siblings, LONGEST)
        for num_nodes in range(max_depth + 1, len(parents) + 1):
            shape = TreeShape(tuple(parents[:num_nodes]))
            trees[max_depth, num_nodes] = TreeForecast(shape, 1 + sum(chances[:num_nodes]), num_nodes)
    return Candidate(LONGEST, {"a": forecast(rate)}, trees={"a": trees})


@given(shares, st.lists(shares, min_size=2, max_size=2), all_times, st.floats(1.0, 1.5))
def test_with_trees_the_plan_is_the_best_one_or_a_chain_about_as_good(
    rate: float, siblings: list[float], times: Times, tree_factor: float
) -> None:
    candidate, times = with_trees(rate, siblings), replace(times, tree_factor=tree_factor)
    plan = planned([candidate], times)

    def rate_of(num_tokens: float, num_rows: float, depth: int, is_tree: bool) -> float:
        step = times.step_time(1, 1 + num_rows, sampled=False, is_tree=is_tree)
        assert step is not None
        return num_tokens / (step + times.draft_time("a", 1, depth, sampled=False))

    chains = [rate_of(candidate.forecasts["a"].num_tokens[n], n, n, False) for n in range(1, LONGEST + 1)]
    trees = [rate_of(tree.num_tokens, tree.num_rows, depth, True) for (depth, _), tree in candidate.trees["a"].items()]
    plain = value([candidate], [NO_DRAFTING], times)
    if plan.budgets[0].shape is None:
        assert plan.rate * DOUBT >= max(trees)
        assert plan.rate == pytest.approx(max(chains)) or (
            plan.budgets == [NO_DRAFTING] and max(chains) <= DOUBT * plain
        )
    else:
        assert plan.rate == pytest.approx(max(trees))
        assert plan.rate > max(chains)


def test_each_sequence_gets_the_tree_or_chain_that_suits_it() -> None:
    strong, weak = with_trees(0.95, (0.1, 0.1)), with_trees(0.3, (0.6, 0.5))
    plan = planned([strong, weak], Times(1.0, 0.01, {"a": (0.0, 0.01, 0.0)}))
    assert plan.budgets[0].shape is None
    assert plan.budgets[1].shape is not None
    assert len(plan.budgets[1].shape) == plan.budgets[1].max_draft


@given(candidates, all_times)
def test_the_plan_for_one_sequence_is_the_best_one(candidate: Candidate, times: Times) -> None:
    plan = planned([candidate], times)
    plain = value([candidate], [NO_DRAFTING], times)
    best = max(value([candidate], [budget], times) for budget in every_budget(candidate))
    rate = value([candidate], plan.budgets, times)
    assert plan.rate == pytest.approx(rate)
    assert rate == pytest.approx(best) or (plan.budgets == [NO_DRAFTING] and best <= DOUBT * plain)


@given(st.lists(candidates, min_size=1, max_size=5), all_times)
def test_the_plan_for_several_sequences_is_never_worse_than_a_common_budget_or_none(
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
def test_the_plan_for_two_sequences_is_close_to_the_best_pair(a: float, b: float, row: float, per_depth: float) -> None:
    """Individual budgets are found without trying all pairs, so the result may be slightly worse."""
    batch = [Candidate(LONGEST, {"a": forecast(rate)}) for rate in (a, b)]
    times = Times(1.0, row, {"a": (0.0, per_depth, 0.0)})
    best = max(value(batch, budgets, times) for budgets in product(*map(every_budget, batch)))
    assert planned(batch, times).rate >= best / 1.06


def test_nothing_is_drafted_where_drafts_cost_more_than_they_gain() -> None:
    candidate = Candidate(LONGEST, {"a": forecast(0.3)})
    assert planned([candidate], Times(1.0, 0.0, {"a": (0.0, 0.5, 0.0)})).budgets == [NO_DRAFTING]
    assert planned([candidate], Times(1.0, 0.5, {"a": (0.0, 0.0, 0.0)})).budgets == [NO_DRAFTING]


def test_free_drafts_that_are_always_right_are_as_long_as_possible() -> None:
    candidate = Candidate(LONGEST, {"a": forecast(1.0)})
    assert planned([candidate], Times(1.0, 0.0, {"a": (0.0, 0.0, 0.0)})).budgets == [DraftBudget("a", LONGEST)]


def test_drafters_are_chosen_by_time_not_by_length() -> None:
    """A cheap draft is better than a longer and likelier one."""
    candidate = Candidate(LONGEST, {"a": forecast(0.9), "b": forecast(0.6)})
    (budget,) = planned([candidate], Times(1.0, 0.02, {"a": (0.0, 0.4, 0.0), "b": (0.0, 0.0, 0.0)})).budgets
    assert budget.drafter == "b"


def test_the_time_of_catching_up_counts() -> None:
    times = Times(1.0, 0.0, {"a": (0.0, 0.1, 0.0)})
    forecasts = {"a": forecast(0.9)}
    assert planned([Candidate(LONGEST, forecasts)], times).budgets != [NO_DRAFTING]
    assert planned([Candidate(LONGEST, forecasts, {"a": 10.0})], times).budgets == [NO_DRAFTING]


def test_different_texts_get_different_budgets() -> None:
    batch = [Candidate(LONGEST, {"a": forecast(rate)}) for rate in (0.95, 0.02)]
    good, bad = planned(batch, Times(1.0, 0.15, {"a": (0.0, 0.02, 0.0)})).budgets
    assert good.max_draft > bad.max_draft


def test_where_the_targets_time_is_unknown_there_is_no_plan() -> None:
    class Unknown(Times):
        def step_time(
            self, num_sequences: int, num_rows: float, *, sampled: bool, is_tree: bool = False
        ) -> float | None:
            return None

    times = Unknown(1.0, 0.0, {"a": (0.0, 0.0, 0.0)})
    assert best_plan([Candidate(LONGEST, {"a": forecast(1.0)})], times, sampled=False) is None


@pytest.mark.parametrize(("lookup_rate", "chosen"), [(0.62, "b"), (0.75, "a"), (0.55, "b")])
def test_a_lookup_that_a_hybrid_asks_first_must_be_clearly_better(lookup_rate: float, chosen: str) -> None:
    """Small differences are chance, and while the lookup is used nothing is learned about the hybrid."""
    times = Times(1.0, 0.0, {"a": (0.0, 0.0, 0.0), "b": (0.0, 0.0, 0.0)})
    alike = Candidate(1, {"a": forecast(lookup_rate), "b": forecast(0.6)})
    assert planned([alike], times).budgets[0].drafter == ("a" if lookup_rate > 0.6 else "b")
    assert planned([alike], times, asked_first="a").budgets[0].drafter == chosen


def test_where_a_hybrid_does_not_pay_its_lookup_is_used() -> None:
    times = Times(1.0, 0.0, {"a": (0.0, 0.0, 0.0), "b": (5.0, 0.0, 0.0)})
    candidate = Candidate(1, {"a": forecast(0.04), "b": forecast(0.6)})
    assert planned([candidate], times, asked_first="a").budgets[0] == DraftBudget("a", 1)


def test_in_a_batch_too_a_lookup_must_be_clearly_better_than_a_hybrid() -> None:
    times = Times(1.0, 0.001, {"a": (0.0, 0.0, 0.0), "b": (0.0, 0.0, 0.0)})
    forecasts = {"b": forecast(0.6)}
    batch = [Candidate(1, forecasts | {"a": forecast(rate)}) for rate in (0.2, 0.62, 0.9)]
    assert [budget.drafter for budget in planned(batch, times, asked_first="a").budgets] == ["b", "b", "a"]
