"""Budgets for batches, and when a new plan is made."""

from __future__ import annotations

from foredraft.engine.sequence import TokenSequence
from foredraft.policy import NO_DRAFTING, CostModel, DraftBudget
from foredraft.policy.acceptance import AcceptanceEstimator
from foredraft.policy.base import Cooldowns
from foredraft.policy.budget_planner import BudgetPlanner
from foredraft.policy.sequence_state import SequenceStates
from tests.policy.simulator import text

LONGEST = 4


class Planner(BudgetPlanner):
    """A planner whose parts a test can access. A pass costs 10 ms, a draft nothing."""

    def __init__(self, *drafters: str) -> None:
        self.cooldowns = Cooldowns()
        self.acceptance = {name: AcceptanceEstimator(LONGEST) for name in drafters}
        costs = CostModel()
        for _ in range(5):
            costs.record_step(1, 1, 0.010, sampled=False)
            costs.record_step(1, 1 + LONGEST, 0.010, sampled=False)
        super().__init__(self.acceptance, {}, costs, SequenceStates(drafters), self.cooldowns, LONGEST)

    def budget(self, sequence: TokenSequence, step: int = 1) -> DraftBudget:
        (budget,) = self.budgets([sequence], step, sampled=False)
        return budget


def test_a_draft_that_costs_nothing_is_as_long_as_possible() -> None:
    planner = Planner("a")
    assert planner.budget(text()) == DraftBudget("a", LONGEST)
    assert planner.budget(text(1, room=3)) == DraftBudget("a", 2)
    assert planner.budget(text(2, room=1)) == NO_DRAFTING


def test_a_sequence_with_a_fixed_number_gets_it_from_the_first_drafter() -> None:
    planner = Planner("a", "b")
    assert planner.fixed_budget(text(wanted=3)) == DraftBudget("a", 3)
    assert planner.fixed_budget(text(wanted=3, room=2)) == DraftBudget("a", 1)
    assert planner.fixed_budget(text(wanted=0)) == NO_DRAFTING
    planner.cooldowns.start(["a"], "failed", 5)
    assert planner.fixed_budget(text(wanted=3)) == NO_DRAFTING


def test_a_drafter_that_cools_down_is_not_used() -> None:
    planner = Planner("a", "b")
    planner.cooldowns.start(["a"], "failed", 5)
    assert planner.budget(text()).drafter == "b"


def test_a_plan_is_reused_until_new_drafts_or_many_steps_or_a_clear() -> None:
    planner = Planner("a")
    first = planner.budgets([text()], 1, sampled=False)
    assert planner.budgets([text(1)], 1000, sampled=False) is first, "the same state"
    for _ in range(4):
        planner.add_draft()
    assert planner.budgets([text()], 1, sampled=False) is first
    planner.add_draft()
    second = planner.budgets([text()], 1, sampled=False)
    assert second is not first
    third = planner.budgets([text()], 2000, sampled=False)
    assert third is not second
    planner.clear()
    assert planner.budgets([text()], 2000, sampled=False) is not third
