"""Budgets for batches, and when a new plan is made."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.engine.sequence import TokenSequence
from foredraft.policy import NO_DRAFTING, CostModel, DraftBudget, Hybrid
from foredraft.policy.acceptance import AcceptanceEstimator
from foredraft.policy.base import Cooldowns
from foredraft.policy.budget_planner import BudgetPlanner
from foredraft.policy.sequence_state import SequenceStates
from tests.policy.simulator import text

LONGEST = 4


class Planner(BudgetPlanner):
    """A planner whose parts a test can access. A pass costs 10 ms, a draft nothing, unless its drafter is in draft_ms."""

    def __init__(
        self,
        *drafters: str,
        hybrid: Hybrid | None = None,
        draft_ms: Mapping[str, float] | None = None,
    ) -> None:
        self.cooldowns = Cooldowns()
        self.acceptance = {name: AcceptanceEstimator(LONGEST) for name in drafters}
        costs = CostModel()
        for _ in range(5):
            costs.record_step(1, 1, 0.010, sampled=False)
            costs.record_step(1, 1 + LONGEST, 0.010, sampled=False)
            for name, milliseconds in (draft_ms or {}).items():
                for depth in (1, LONGEST):
                    for is_sampled in (False, True):
                        costs.record_draft(name, 1, depth, 0, milliseconds / 1000, sampled=is_sampled)
        states = SequenceStates(drafters)
        super().__init__(self.acceptance, {}, costs, states, self.cooldowns, LONGEST, hybrid=hybrid)

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


def test_among_equals_each_gets_the_budget_of_a_batch_like_itself() -> None:
    planner = Planner("a")
    budgets = planner.budgets([text(seq_id) for seq_id in range(3)], 1, sampled=False)
    assert planner.budget_among_equals(text(9), 3, 1, sampled=False) is budgets[0], "from the same plan"


def test_a_hybrid_is_used_in_place_of_its_model() -> None:
    hybrid = Hybrid("hybrid", "suffix", "eagle")
    planner = Planner("eagle", "suffix", "hybrid", hybrid=hybrid, draft_ms={"suffix": 0.1, "hybrid": 0.1})
    assert not planner.may_use("eagle")
    assert planner.may_use("suffix")
    for params in ({"temperature": 0.0}, {"temperature": 0.8}):
        assert planner.budget(text(params=params)).drafter != "eagle", "although its cost is unknown"
    planner.cooldowns.start(["hybrid"], "failed", 5)
    assert planner.may_use("eagle")
    assert planner.fixed_budget(text(wanted=2)) == DraftBudget("eagle", 2), (
        "it serves requests with a number of their own"
    )


def test_beside_a_hybrid_a_fixed_number_comes_from_the_first_drafter() -> None:
    """In a batch with a text whose drafts "auto" chooses."""
    hybrid = Hybrid("hybrid", "suffix", "eagle")
    planner = Planner("eagle", "suffix", "hybrid", hybrid=hybrid, draft_ms={"eagle": 0.1, "suffix": 0.1, "hybrid": 0.1})
    free, fixed = planner.budgets([text(0), text(1, wanted=3)], 1, sampled=False)
    assert free.drafter in ("suffix", "hybrid")
    assert fixed == DraftBudget("eagle", 3)
