"""Budgets for batches, and when a new plan is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from foredraft.engine.sequence import TokenSequence
from foredraft.policy import NO_DRAFTING, CostModel, DraftBudget
from foredraft.policy.acceptance import AcceptanceEstimator
from foredraft.policy.base import Cooldowns
from foredraft.policy.budget_planner import BudgetPlanner
from foredraft.policy.sequence_state import SequenceStates
from tests.policy.simulator import text

LONGEST = 4


class Planner(BudgetPlanner):
    """A planner whose parts a test can access. A pass costs 10 ms, a draft nothing, unless its drafter is in draft_ms. merged: the parts
    of "merged"."""

    def __init__(
        self,
        *drafters: str,
        merged: Sequence[str] = (),
        replaced: Mapping[str, str] | None = None,
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
        parts = {"merged": merged} if merged else {}
        states = SequenceStates(drafters)
        super().__init__(
            self.acceptance, {}, costs, states, self.cooldowns, LONGEST, merged=parts, replaced=replaced or {}
        )

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


def planner_with(part: str, part_ms: float) -> Planner:
    """A merged drafter of 1 ms and one of its parts, which are accepted equally often, so the faster one would be used."""
    return Planner(part, "merged", merged=[part], draft_ms={part: part_ms, "merged": 1.0})


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_the_main_part_of_a_merged_drafter_is_not_used_by_itself(params: dict[str, float]) -> None:
    assert planner_with("eagle", 0.95).budget(text(params=params)).drafter == "merged"


def test_a_part_that_is_much_faster_than_the_merged_drafter_may_be_used() -> None:
    assert planner_with("suffix", 0.05).budget(text()).drafter == "suffix"


def test_drafts_that_are_drawn_are_left_to_the_parts() -> None:
    """A merged draft is never drawn."""
    assert planner_with("eagle", 0.95).budget(text(params={"temperature": 0.8})).drafter == "eagle"


def test_while_the_merged_drafter_cools_down_its_parts_are_used() -> None:
    planner = planner_with("eagle", 0.95)
    planner.cooldowns.start(["merged"], "failed", 5)
    assert planner.budget(text()).drafter == "eagle"


def test_a_part_of_unknown_cost_is_tried() -> None:
    planner = Planner("eagle", "merged", merged=["eagle"], draft_ms={"merged": 1.0})
    assert planner.budget(text()).drafter == "eagle"


def test_a_substitute_is_used_in_place_of_a_drafter() -> None:
    planner = Planner(
        "eagle", "suffix", "hybrid", replaced={"eagle": "hybrid"}, draft_ms={"suffix": 0.1, "hybrid": 0.1}
    )
    assert not planner.may_use("eagle")
    assert planner.may_use("suffix")
    for params in ({"temperature": 0.0}, {"temperature": 0.8}):
        assert planner.budget(text(params=params)).drafter != "eagle", "although its cost is unknown"
    planner.cooldowns.start(["hybrid"], "failed", 5)
    assert planner.may_use("eagle")
    assert planner.fixed_budget(text(wanted=2)) == DraftBudget("eagle", 2), (
        "it serves requests with a number of their own"
    )
