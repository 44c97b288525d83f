"""Thresholds that a user sets: drafters that cross them cool down, which is logged and counted."""

from __future__ import annotations

from collections import Counter

import pytest

from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError
from foredraft.policy import Controller, FixedPolicy, Guard, Policy
from tests.policy.simulator import FakeDrafter, Simulator, no_time, text

COOLDOWN = 100


class Holder:
    """A drafter with the interface that a guard uses."""

    def __init__(self, bytes_held: int = 0) -> None:
        self.bytes_held = bytes_held
        self.forgotten: set[int] = set()

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        raise AssertionError("a policy drafts nothing")

    def forget(self, seq_ids: list[int]) -> None:
        self.forgotten.update(seq_ids)
        self.bytes_held = 0


def simulate(policy: Policy, acceptance: float) -> Simulator:
    drafter = FakeDrafter(lambda num_requests, depth: 0.0001, lambda seq_id: acceptance)
    return Simulator(policy, {"a": drafter}, lambda num_rows: 0.01)


def guard(holder: Holder | None = None, *, num_steps: int = COOLDOWN, **thresholds: float | int) -> Guard:
    return Guard(FixedPolicy("a"), {"a": holder or Holder()}, window=64, num_steps=num_steps, **thresholds)  # type: ignore[arg-type]


def test_a_drafter_below_the_lowest_acceptance_cools_down_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    policy = guard(min_acceptance_rate=0.5)
    simulator = simulate(policy, acceptance=0.2)
    simulator.add(text(wanted=4))
    rounds = simulator.run(16 + COOLDOWN + 1)
    assert [one.num_requested for one in rounds] == [4] * 16 + [0] * COOLDOWN + [4]
    assert policy.crossings == {("a", "min_acceptance_rate"): 1}
    (record,) = caplog.records
    message = record.getMessage()
    assert record.levelname == "WARNING"
    assert "\n" not in message
    for part in ("a:", "min_acceptance_rate", "50.0%", "64", str(COOLDOWN)):
        assert part in message
    simulator.run(15)
    assert policy.crossings == {("a", "min_acceptance_rate"): 2}  # drafts before the cooldown do not count


def test_a_drafter_above_the_lowest_acceptance_is_not_affected(caplog: pytest.LogCaptureFixture) -> None:
    policy = guard(min_acceptance_rate=0.5)
    simulator = simulate(policy, acceptance=0.97)
    simulator.add(text(wanted=4))
    assert {one.num_requested for one in simulator.run(500)} == {4}
    assert not policy.crossings
    assert not caplog.records


def test_acceptance_is_computed_over_the_last_tokens() -> None:
    """Many accepted tokens before do not compensate for a bad window."""
    rate = [1.0]
    drafter = FakeDrafter(lambda num_requests, depth: 0.0001, lambda seq_id: rate[0])
    policy = guard(min_acceptance_rate=0.5)
    simulator = Simulator(policy, {"a": drafter}, lambda num_rows: 0.01)
    simulator.add(text(wanted=4))
    simulator.run(1000)
    rate[0] = 0.0
    assert [one.num_requested for one in simulator.run(16)][:8] == [4] * 8
    assert policy.crossings


def test_a_drafter_above_its_memory_threshold_frees_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    holder = Holder()
    policy = guard(holder, max_draft_memory=1 << 20)
    simulator = simulate(policy, acceptance=0.9)
    simulator.add(text(0, wanted=4), text(1, wanted=0))
    simulator.run(10)
    assert not policy.crossings
    holder.bytes_held = 3 << 20
    rounds = simulator.run(1 + COOLDOWN + 1)
    assert [one.num_requested for one in rounds] == [4] + [0] * COOLDOWN + [4]
    assert holder.forgotten == {0, 1}
    assert holder.bytes_held == 0
    assert policy.crossings == {("a", "max_draft_memory"): 1}
    (record,) = caplog.records
    for part in ("a:", "3.0 MiB", "max_draft_memory", "1.0 MiB", str(COOLDOWN)):
        assert part in record.getMessage()


def test_a_drafter_that_fails_to_forget_still_cools_down(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Holder):
        def forget(self, seq_ids: list[int]) -> None:
            raise RuntimeError("injected")

    policy = guard(Forgetful(), min_acceptance_rate=0.5)
    simulator = simulate(policy, acceptance=0.2)
    simulator.add(text(wanted=4))
    rounds = simulator.run(17)
    assert [one.num_requested for one in rounds] == [4] * 16 + [0]
    assert policy.crossings == {("a", "min_acceptance_rate"): 1}
    assert ["Forgetful failed" in record.getMessage() for record in caplog.records] == [True, False]


def test_a_drafter_without_memory_never_crosses_a_threshold() -> None:
    class Bare:
        def propose(self, requests: list[DraftRequest]) -> Proposal:
            raise AssertionError

        def forget(self, seq_ids: list[int]) -> None:
            raise AssertionError

    policy = Guard(FixedPolicy("a"), {"a": Bare()}, max_draft_memory=0)
    simulator = simulate(policy, acceptance=0.9)
    simulator.add(text(wanted=4))
    assert {one.num_requested for one in simulator.run(50)} == {4}


def test_a_guard_without_thresholds_changes_nothing() -> None:
    def budgets(policy: Policy) -> list[int]:
        simulator = simulate(policy, acceptance=0.8)
        simulator.add(text(0), text(1, wanted=3))
        return [one.num_requested for one in simulator.run(300)]

    def timeless() -> Controller:
        return Controller(["a"], clock=no_time)

    assert budgets(Guard(timeless(), {"a": Holder()})) == budgets(timeless())


def test_thresholds_apply_to_the_controllers_drafts_too() -> None:
    policy = Guard(Controller(["a"], clock=no_time), {"a": Holder()}, min_acceptance_rate=0.9)
    simulator = simulate(
        policy, acceptance=0.7
    )  # drafting is worthwhile, but the acceptance rate is below the threshold
    simulator.add(text())
    simulator.run(1000)
    assert policy.crossings["a", "min_acceptance_rate"] >= 1
    assert sum(one.num_requested > 0 for one in simulator.rounds) < 500


def test_another_drafter_takes_over_from_one_that_crossed_a_threshold() -> None:
    """The wrapped policy knows about the cooldown, so it does not fall back to plain decoding."""
    drafters = {
        "a": FakeDrafter(lambda num_requests, depth: 0.0001, lambda seq_id: 0.75),
        "b": FakeDrafter(lambda num_requests, depth: 0.02, lambda seq_id: 0.95),
    }
    controller = Controller(["a", "b"], clock=no_time)
    policy = Guard(controller, {name: Holder() for name in drafters}, min_acceptance_rate=0.5)
    simulator = Simulator(policy, drafters, lambda num_rows: 0.01)
    simulator.add(text())
    while not policy.crossings:
        assert len(simulator.run(1)) < 2000
    drafters_used = [
        budget.drafter for one in simulator.run(400) for budget in one.budgets.values() if budget.max_draft
    ]
    assert set(drafters_used) == {"b"}
    assert len(drafters_used) > 320


def test_memory_cooldowns_are_passed_to_the_policy() -> None:
    policy = guard(min_acceptance_rate=0.0)
    simulator = simulate(policy, acceptance=0.9)
    simulator.add(text(wanted=4))
    simulator.run(5)
    simulator.give_up(["a"])
    assert simulator.run(1)[0].num_requested == 0
    assert policy.cooldowns() == {"a": "memory_short"}
    assert not policy.crossings


def test_cooldowns_name_the_drafter_and_the_reason() -> None:
    policy = guard(min_acceptance_rate=0.5)
    simulator = simulate(policy, acceptance=0.2)
    simulator.add(text(wanted=4))
    for _ in range(3 * COOLDOWN):
        cooldowns = policy.cooldowns()
        assert cooldowns == ({} if simulator.run(1)[0].num_requested else {"a": "min_acceptance_rate"})
    assert policy.crossings


def test_crossings_merge_by_addition() -> None:
    a: Counter[tuple[str, str]] = Counter({("a", "min_acceptance_rate"): 1})
    assert (a + Counter({("a", "min_acceptance_rate"): 2}))["a", "min_acceptance_rate"] == 3
    policy = guard(min_acceptance_rate=0.5)
    assert isinstance(policy.crossings, Counter)


@pytest.mark.parametrize(
    "threshold",
    [{"min_acceptance_rate": bad} for bad in (-0.1, 1.1, float("nan"), "0.5", True)]
    + [{"max_draft_memory": bad} for bad in (-1, 0.5, "1GiB", True)],
    ids=str,
)
def test_an_invalid_threshold_is_refused(threshold: dict[str, float]) -> None:
    with pytest.raises(ForedraftError, match=next(iter(threshold))):
        guard(**threshold)
