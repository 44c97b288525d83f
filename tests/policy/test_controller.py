"""The controller on simulated texts and times: what it learns, when it stops drafting, and what learning costs."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median

import pytest
import torch

import foredraft.policy
from foredraft.engine.proposal import Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Outcome, ScheduledSequence, Step
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.policy import Controller, ControllerState, FixedPolicy, Hybrid
from foredraft.policy.acceptance import NEW, AcceptanceHistory
from tests.laws import sampler_for
from tests.policy.simulator import GREEDY, FakeDrafter, Round, Simulator, draft_share, no_time, text, tokens_per_second

FIRST_LEARNING = 400
LONGEST = 8
SWITCH = 16
"""The steps within which the controller must react to a change of the text."""


def pass_seconds(num_rows: int) -> float:
    """The pass of a large target, which mostly takes the time to read the weights, whatever the number of rows."""
    return 0.010 + 0.0001 * num_rows


def flat(rate: float) -> Callable[[int], float]:
    return lambda seq_id: rate


def drafter(acceptance: float | Callable[[int], float], per_token: float = 0.001, **settings: float) -> FakeDrafter:
    """A drafter that takes per_token seconds for each draft token, whatever the number of requests."""
    chance = acceptance if callable(acceptance) else flat(acceptance)
    return FakeDrafter(lambda num_requests, depth: 0.0002 + per_token * depth, chance, **settings)


def simulate(
    drafters: dict[str, FakeDrafter], *texts: TokenSequence, seed: int = 0, tree_drafters: Sequence[str] = ()
) -> Simulator:
    controller = Controller(list(drafters), max_draft=LONGEST, tree_drafters=tree_drafters, clock=no_time)
    simulator = Simulator(controller, drafters, pass_seconds, seed=seed)
    simulator.add(*texts)
    return simulator


def plain_rate(batch_size: int = 1) -> float:
    return batch_size / pass_seconds(batch_size)


def best_fixed(stands: float, per_token: float) -> float:
    """Tokens per second with the best fixed number of draft tokens, by simulation."""
    rates = []
    for wanted in range(LONGEST + 1):
        simulator = Simulator(FixedPolicy("a"), {"a": drafter(stands, per_token)}, pass_seconds)
        simulator.add(text(wanted=wanted))
        rates.append(tokens_per_second(simulator.run(1500)))
    return max(rates)


@pytest.mark.parametrize(("stands", "per_token"), [(0.95, 0.0005), (0.9, 0.001), (0.7, 0.001), (0.5, 0.0005)])
def test_where_drafting_is_worthwhile_it_is_nearly_as_fast_as_the_best_fixed_number(
    stands: float, per_token: float
) -> None:
    simulator = simulate({"a": drafter(stands, per_token)}, text())
    simulator.run(FIRST_LEARNING)
    assert tokens_per_second(simulator.run(3000)) >= 0.95 * best_fixed(stands, per_token)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize(("stands", "per_token"), [(0.0, 0.003), (0.3, 0.010), (0.0, 0.0002)])
def test_where_drafting_is_not_worthwhile_it_stops(stands: float, per_token: float, batch_size: int) -> None:
    simulator = simulate({"a": drafter(stands, per_token)}, *map(text, range(batch_size)))
    simulator.run(FIRST_LEARNING)
    assert tokens_per_second(simulator.run(3000)) >= 0.985 * plain_rate(batch_size)


@pytest.mark.parametrize(
    "siblings",
    [
        (0.45, 0.3, 0.2),
        pytest.param((0.3, 0.2, 0.1), marks=pytest.mark.slow),
        (0.1, 0.05, 0.0),
        pytest.param((0.0, 0.0, 0.0), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("stands", "per_token"), [(0.9, 0.0005), (0.7, 0.001), (0.4, 0.0005), (0.3, 0.001)])
def test_trees_never_make_it_slower(stands: float, per_token: float, siblings: tuple[float, ...]) -> None:
    rates = []
    for tree_drafters in ((), ("a",)):
        one = drafter(stands, per_token)
        one.siblings = siblings
        simulator = simulate({"a": one}, text(), tree_drafters=tree_drafters)
        simulator.run(FIRST_LEARNING)
        rates.append(tokens_per_second(simulator.run(6000)))
    assert rates[1] >= 0.985 * rates[0]


def test_the_model_of_a_hybrid_is_used_only_while_the_hybrid_cools_down() -> None:
    drafters = {"a": drafter(0.9), "b": drafter(0.9, 0.002)}
    controller = Controller([*drafters], max_draft=LONGEST, hybrid=Hybrid("b", "lookup", "a"), clock=no_time)
    simulator = Simulator(controller, drafters, pass_seconds)
    simulator.add(text())
    assert {budget.drafter for one in simulator.run(600) for budget in one.budgets.values()} <= {"", "b"}
    controller.cool_down(["b"], "failed", 100)
    assert {budget.drafter for one in simulator.run(60) for budget in one.budgets.values()} == {"a"}


def test_a_hybrid_is_probed_where_its_lookup_is_used_alone() -> None:
    """While the lookup is used, nothing else would show that the model has become worth its time."""
    found = []
    for seed in range(9):
        rate = Changing(0.02)
        drafters = {"lookup": drafter(0.5, 0.0), "model": drafter(rate), "hybrid": drafter(rate)}
        hybrid = Hybrid("hybrid", "lookup", "model")
        controller = Controller([*drafters], max_draft=LONGEST, hybrid=hybrid, clock=no_time)
        simulator = Simulator(controller, drafters, pass_seconds, seed=seed)
        simulator.add(text())
        before = simulator.run(1000)[-500:]
        assert sum(map(drafts_with("lookup"), before)) > 0.9 * len(before)
        rate.rate = 0.95
        found.append(rounds_to(simulator.run(300), drafts_with("hybrid")))
    assert median(found) < 100


def test_a_weak_drafter_with_good_siblings_is_faster_with_trees() -> None:
    rates, budgets = [], []
    for tree_drafters in ((), ("a",)):
        weak = drafter(0.4, 0.001)
        weak.siblings = (0.4, 0.25, 0.2)
        simulator = simulate({"a": weak}, text(), tree_drafters=tree_drafters)
        simulator.run(FIRST_LEARNING)
        rounds = simulator.run(3000)
        rates.append(tokens_per_second(rounds))
        budgets.append([budget for one in rounds for budget in one.budgets.values()])
    assert not any(budget.shape for budget in budgets[0])
    assert sum(budget.shape is not None for budget in budgets[1]) > 0.9 * len(budgets[1])
    assert rates[1] >= 1.08 * rates[0]


def test_where_siblings_are_never_accepted_it_returns_to_chains() -> None:
    strong = drafter(0.8, 0.0005)
    strong.siblings = (0.0, 0.0, 0.0)
    simulator = simulate({"a": strong}, text(), tree_drafters=["a"])
    simulator.run(FIRST_LEARNING)
    budgets = [budget for one in simulator.run(3000) for budget in one.budgets.values()]
    # trees are tried again now and then, since counts of siblings fade
    assert sum(budget.shape is not None for budget in budgets) < 0.1 * len(budgets)


def merged_of(acceptance: float, siblings: tuple[float, ...]) -> dict[str, FakeDrafter]:
    """A lookup that costs nothing, a draft model, and a merged drafter that costs as much as both."""
    merged = drafter(acceptance, 0.0005)
    merged.siblings = siblings
    return {"lookup": drafter(0.5, 0.0), "model": drafter(0.6, 0.0005), "merged": merged}


def test_a_merged_tree_is_drafted_where_it_is_faster_than_its_parts() -> None:
    rates, used = [], []
    for names in (["lookup", "model"], ["lookup", "model", "merged"]):
        drafters = {name: each for name, each in merged_of(0.75, (0.4, 0.2)).items() if name in names}
        simulator = simulate(drafters, text(), tree_drafters=names)
        simulator.run(FIRST_LEARNING)
        rounds = simulator.run(3000)
        rates.append(tokens_per_second(rounds))
        used.append([budget.drafter for one in rounds for budget in one.budgets.values()])
    assert used[1].count("merged") > 0.9 * len(used[1])
    assert rates[1] >= 1.1 * rates[0]


def test_a_merged_tree_that_is_no_faster_than_its_parts_is_not_drafted() -> None:
    rates = []
    for names in (["lookup", "model"], ["lookup", "model", "merged"]):
        drafters = {name: each for name, each in merged_of(0.5, (0.0, 0.0)).items() if name in names}
        simulator = simulate(drafters, text(), tree_drafters=names)
        simulator.run(FIRST_LEARNING)
        rates.append(tokens_per_second(simulator.run(6000)))
    assert rates[1] >= 0.985 * rates[0]


def test_siblings_beyond_the_requested_shape_are_counted_too() -> None:
    """A merged tree has a different shape where one of its parts finds nothing."""
    wanted, drafted, rates = TreeShape((ROOT, 0)), (ROOT, ROOT), {}
    for rank, path in {0: [0], 1: [1], None: []}.items():
        controller = Controller(["a"], tree_drafters=["a"], clock=no_time)
        sequence = TokenSequence(0, [1, 1], sampler_for(GREEDY, prompt=[1]), max_len=100, speculative_tokens=None)
        item = ScheduledSequence(sequence, 1, True, len(wanted), "a", shape=wanted)
        new_ids = [1] * (len(path) + 1)
        outcome = Outcome([5, 6], drafted, path, new_ids, torch.empty(0, 0), [])
        proposal = Proposal.certain([outcome.draft_ids], [drafted])
        controller.observe(Step([item], [item], proposal, [outcome], {"a": 0.001}, 0.01, 0.0, [len(new_ids)], 0.011))
        rates[rank] = controller._trees["a"]._all.sibling_rates([0.5, 0.5, 0.5])[0]
    assert rates[None] < rates[0] == 0.5 < rates[1]


@pytest.mark.parametrize(
    ("sampling", "counts"), [({"temperature": 1.0}, False), (GREEDY, True)], ids=["unseeded", "greedy"]
)
def test_the_drafted_size_of_a_tree_counts_only_where_no_noise_is_drawn(
    sampling: dict[str, float], counts: bool
) -> None:
    """Which nodes are drafted may depend on the noise of positions that the text has not reached."""
    shape, forecasts = TreeShape((ROOT, ROOT, 0, 0)), []
    for num_grown in (2, 4):
        controller = Controller(["a"], tree_drafters=["a"], clock=no_time)
        sequence = TokenSequence(0, [1, 1], sampler_for(sampling, prompt=[1]), max_len=100, speculative_tokens=None)
        item = ScheduledSequence(sequence, 1, True, len(shape), "a", shape=shape)
        outcome = Outcome([0] * num_grown, shape.parents[:num_grown], [0], [0, 1], torch.empty(0, 0), [])
        proposal = Proposal.certain([outcome.draft_ids])
        controller.observe(Step([item], [item], proposal, [outcome], {"a": 0.001}, 0.01, 0.0, [2], 0.011))
        forecasts.append(controller._trees["a"].forecasts(NEW))
    assert (forecasts[0] != forecasts[1]) == counts


def test_the_cost_of_catching_up_counts_too() -> None:
    simulator = simulate({"a": drafter(0.0, 0.002, reading=0.0005)}, text(prompt_len=300))
    simulator.run(FIRST_LEARNING)
    assert tokens_per_second(simulator.run(4000)) >= 0.985 * plain_rate()


def test_many_short_texts_cost_no_more_than_one_long_text() -> None:
    """Each new text may be probed, and has a prompt that the drafter must read first."""
    simulator = simulate({"a": drafter(0.0, 0.002, reading=0.0002)})
    for seq_id in range(60):
        simulator.add(text(seq_id, prompt_len=40, room=60))
        simulator.run(60)
    late = simulator.rounds[FIRST_LEARNING:]
    plain = sum(pass_seconds(40 if i % 60 == 0 else 1) for i in range(FIRST_LEARNING, 3600))
    assert sum(one.seconds for one in late) <= 1.015 * plain


class Changing:
    """An acceptance rate that a test changes during a text."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, seq_id: int) -> float:
        return self.rate


def mean_max_draft(rounds: Sequence[Round], name: str = "a") -> float:
    budgets = [budget for one in rounds for budget in one.budgets.values()]
    return sum(budget.max_draft for budget in budgets if budget.drafter == name) / len(budgets)


def rounds_to(rounds: Sequence[Round], holds: Callable[[Round], bool], window: int = 6) -> int:
    """The number of steps until the condition holds in all but at most one step of a window, or all steps if it never does."""
    found = [holds(one) for one in rounds]
    starts = range(len(found) - window + 1)
    return next((i for i in starts if sum(found[i : i + window]) >= window - 1), len(found))


def drafts_with(name: str) -> Callable[[Round], bool]:
    return lambda one: any(budget.drafter == name and budget.max_draft > 0 for budget in one.budgets.values())


def rounds_to_switch(good: float, bad: float, per_token: float, seed: int) -> tuple[list[int], list[int]]:
    """A text whose acceptance rate changes six times. -> for each change to bad, the steps until the budget was at most half of the
    usual one; for each change to good, the steps until it was at least half"""
    rate = Changing(good)
    simulator = simulate({"a": drafter(rate, per_token, reading=per_token / 20)}, text(prompt_len=100), seed=seed)
    usual = mean_max_draft(simulator.run(300)[-50:])
    down, up = [], []
    for _ in range(3):
        rate.rate = bad
        down.append(rounds_to(simulator.run(300), lambda one: one.num_requested <= usual / 2))
        rate.rate = good
        up.append(rounds_to(simulator.run(300), lambda one: one.num_requested >= max(usual / 2, 1)))
    return down, up


PAIRS = [(0.95, 0.02, 0.0001), (0.95, 0.02, 0.0005), (0.95, 0.02, 0.001), (0.7, 0.02, 0.0005), (0.8, 0.2, 0.0005)]
"""The acceptance rates in good and in bad text, and seconds per draft token, with a target that takes 10 ms."""


@pytest.mark.parametrize(("good", "bad", "per_token"), PAIRS)
def test_the_number_of_draft_tokens_adapts_within_sixteen_steps(good: float, bad: float, per_token: float) -> None:
    """Down to 0 and back, also the first time. Acceptance is random, so the median of seven texts counts."""
    found = [rounds_to_switch(good, bad, per_token, seed) for seed in range(7)]
    for direction in range(2):
        assert median(pair[direction][0] for pair in found) <= SWITCH
        assert median(rounds for pair in found for rounds in pair[direction]) <= SWITCH


@pytest.mark.parametrize("per_token", [0.0001, 0.0005, 0.001])
def test_the_drafter_changes_within_sixteen_steps(per_token: float) -> None:
    """Two drafters, each good at another kind of text."""
    first, rest = [], []
    for seed in range(5):
        rates = {"a": Changing(0.95), "b": Changing(0.05)}
        drafters = {name: drafter(rate, per_token, reading=per_token / 20) for name, rate in rates.items()}
        simulator = simulate(drafters, text(prompt_len=100), seed=seed)
        simulator.run(300)
        found = []
        for turn in range(6):
            rates["a"].rate, rates["b"].rate = rates["b"].rate, rates["a"].rate
            found.append(rounds_to(simulator.run(300), drafts_with("ba"[turn % 2])))
        first.append(found[0])
        rest += found[1:]
    assert median(first) <= SWITCH
    assert median(rest) <= SWITCH


def test_the_probe_budget_is_not_spent_at_once_after_a_change() -> None:
    """A draft token costs 20 % of a step: the probe budget must last until the text is good again."""
    rate = Changing(0.95)
    simulator = simulate({"a": drafter(rate, 0.002, reading=0.0001)}, text(prompt_len=100))
    for _ in range(4):
        for rate.rate in (0.95, 0.02):
            simulator.run(300)
    rate.rate = 0.95
    assert rounds_to(simulator.run(300), drafts_with("a")) < 100


def test_drafters_are_chosen_by_time_not_by_length() -> None:
    simulator = simulate({"long": drafter(0.95, 0.006), "quick": drafter(0.7, 0.0001)}, text())
    simulator.run(FIRST_LEARNING)
    rounds = simulator.run(500)
    assert mean_max_draft(rounds, "quick") > 10 * mean_max_draft(rounds, "long")


def test_texts_of_one_batch_get_individual_budgets() -> None:
    simulator = simulate({"a": drafter(lambda seq_id: 0.95 if seq_id else 0.02, 0.0005)}, *map(text, range(2)))
    simulator.run(FIRST_LEARNING)
    rounds = simulator.run(500)
    bad, good = (sum(one.budgets[seq_id].max_draft for one in rounds) / len(rounds) for seq_id in range(2))
    assert good > 3
    assert bad < 0.5 * good


def test_a_text_that_joins_a_batch_drafts_at_once() -> None:
    """Although the time of a plain step of one text alone is unknown."""
    simulator = simulate({"a": drafter(0.9, 0.0005)}, *map(text, range(4)))
    simulator.run(FIRST_LEARNING)
    for seq_id in range(100, 110):
        simulator.add(text(seq_id))
        (joined,) = simulator.run(1)
        assert joined.budgets[seq_id].max_draft > 3
        simulator.run(10)


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_a_request_with_a_fixed_number_gets_it(wanted: int) -> None:
    """Whether or not that is fastest. The budgets of the other texts in the batch are still chosen."""
    simulator = simulate({"a": drafter(0.0, 0.01), "b": drafter(0.0, 0.01)}, text(0, wanted=wanted), text(1))
    simulator.run(FIRST_LEARNING)
    rounds = simulator.run(300)
    assert {one.budgets[0].max_draft for one in rounds} == {wanted}
    assert {one.budgets[0].drafter for one in rounds if one.budgets[0].max_draft} <= {"a"}
    assert sum(one.budgets[1].max_draft > 0 for one in rounds) < 0.2 * len(rounds)


@pytest.mark.parametrize("wanted", [0, 2, 20])
def test_beside_a_request_with_a_fixed_number_others_get_the_best_budget(wanted: int) -> None:
    """Although there is never a plain step."""
    simulator = simulate({"a": drafter(lambda seq_id: 0.95 * seq_id, 0.0005)}, text(0, wanted=wanted), text(1))
    rounds = simulator.run(300)[-100:]
    assert {one.budgets[0].max_draft for one in rounds} == {wanted}
    assert sum(one.budgets[1].max_draft for one in rounds) / len(rounds) > 3


def test_stored_costs_from_a_busy_machine_do_not_prevent_drafting() -> None:
    """The stored time of a draft token is three times that of today; that of a plain step is the same."""
    busy = simulate({"a": drafter(0.9, 0.012)}, text())
    busy.run(FIRST_LEARNING)
    assert isinstance(busy.policy, Controller)
    assert mean_max_draft(busy.run(100), "a") < 1
    drafters = {"a": drafter(0.9, 0.004)}
    kept = busy.policy.state()
    simulator = Simulator(
        Controller(["a"], max_draft=LONGEST, state=kept, clock=no_time), drafters, pass_seconds, seed=0
    )
    simulator.add(text())
    simulator.run(60)
    assert mean_max_draft(simulator.run(100), "a") > 1


def test_a_text_near_its_end_is_not_drafted_beyond_it() -> None:
    """Simulator._schedule checks that no budget exceeds what can still be emitted."""
    simulator = simulate({"a": drafter(0.95, 0.0001)})
    for seq_id in range(200):
        simulator.add(text(seq_id, room=1 + seq_id % 12))
        simulator.run(4)
    assert draft_share(simulator.rounds) > 0.1


def test_where_memory_is_short_only_drafters_that_held_it_cool_down() -> None:
    simulator = simulate({"a": drafter(0.95, 0.0002), "b": drafter(0.8, 0.0002)}, text())
    simulator.run(FIRST_LEARNING)
    assert mean_max_draft(simulator.run(50), "a") > 1
    simulator.give_up(["a"])
    rounds = simulator.run(20)
    assert mean_max_draft(rounds, "a") == 0
    assert mean_max_draft(rounds, "b") > 1
    simulator.run(200)
    assert mean_max_draft(simulator.run(50), "a") > 1


def test_tokens_that_are_read_again_after_give_up_count_as_reading_time() -> None:
    simulator = simulate({"a": drafter(0.95, 0.0002, reading=0.0001)}, text(prompt_len=1000))
    simulator.run(FIRST_LEARNING)
    for _ in range(8):
        simulator.give_up(["a"])
        simulator.run(100)
    assert isinstance(simulator.policy, Controller)
    assert simulator.policy.costs.reading_time("a", 100) == pytest.approx(0.01, rel=0.5)


def num_histories() -> int:
    gc.collect()
    return sum(type(one) is AcceptanceHistory for one in gc.get_objects())


def test_aborted_texts_leave_nothing_behind() -> None:
    before = num_histories()
    simulator = simulate({"a": drafter(0.9)})
    for seq_id in range(300):
        one = text(seq_id)
        simulator.add(one)
        simulator.run(3)
        simulator.abort(one)
    simulator.add(text(1000))
    simulator.run(100)
    assert num_histories() - before < 20


def test_with_the_costs_of_an_earlier_process_drafting_starts_at_once() -> None:
    first = simulate({"a": drafter(0.9)}, text())
    first.run(FIRST_LEARNING)
    assert isinstance(first.policy, Controller)
    drafters = {"a": drafter(0.9)}
    policy = Controller(["a"], max_draft=LONGEST, state=first.policy.state(), clock=no_time)
    second = Simulator(policy, drafters, pass_seconds)
    second.add(text())
    assert draft_share(second.run(20)) > 0.5


def started_from(state: ControllerState | None, drafters: dict[str, FakeDrafter], seed: int) -> float:
    """Tokens per second in the first 300 steps of a process that starts from this state."""
    policy = Controller(list(drafters), max_draft=LONGEST, state=state, clock=no_time)
    simulator = Simulator(policy, drafters, pass_seconds, seed=seed)
    simulator.add(text())
    return tokens_per_second(simulator.run(300))


@pytest.mark.parametrize(
    ("rate", "least"), [(0.45, 1.01), (0.5, 1.02), (0.02, 0.99)], ids=["worth it", "more so", "useless"]
)
def test_a_later_process_knows_how_texts_continue_at_each_level(rate: float, least: float) -> None:
    """A draft token takes 30 % of a step. A text with this rate is often rejected several times in a row, and the first process learns
    only by probes that drafting goes on to be worth its time there."""
    ratios = []
    for seed in range(15):
        first = simulate({"a": drafter(rate, 0.003)}, text(), seed=100 + seed)
        first.run(1500)
        assert isinstance(first.policy, Controller)
        state = ControllerState.from_dict(first.policy.state().as_dict())
        known, unknown = (started_from(each, {"a": drafter(rate, 0.003)}, seed) for each in (state, None))
        ratios.append(known / unknown)
    assert median(ratios) >= least


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.8), (0.8, 0.0)])
def test_a_process_with_other_texts_than_the_one_before_learns_as_soon(before: float, now: float) -> None:
    ratios = []
    for seed in range(15):
        first = simulate({"a": drafter(before, 0.001)}, text(), seed=100 + seed)
        first.run(1500)
        assert isinstance(first.policy, Controller)
        known, unknown = (started_from(each, {"a": drafter(now, 0.001)}, seed) for each in (first.policy.state(), None))
        ratios.append(known / unknown)
    assert median(ratios) > 0.99


class Store:
    def __init__(self) -> None:
        self.saved: list[ControllerState] = []

    def save(self, state: ControllerState) -> None:
        self.saved.append(state)


def test_the_state_is_saved_after_256_measured_steps_and_whenever_they_have_doubled() -> None:
    store = Store()
    policy = Controller(["a"], max_draft=LONGEST, store=store, clock=no_time)
    simulator = Simulator(policy, {"a": drafter(0.9)}, pass_seconds)
    simulator.add(text())
    saved = list[int]()
    while policy.costs.num_samples < 1100:
        simulator.run(1)
        saved += [policy.costs.num_samples] if len(store.saved) > len(saved) else []
    assert saved == [256, 512, 1024]
    assert store.saved[-1].chains["a"] != store.saved[0].chains["a"]


# Drafting does not bias the text


def decisions(token_ids: Random) -> list[dict[int, tuple[str, int]]]:
    drafters = {"a": drafter(lambda seq_id: 0.9 - 0.2 * seq_id), "b": drafter(0.5, 0.0002, finds=0.5)}
    policy = Controller(list(drafters), max_draft=LONGEST, clock=no_time)
    simulator = Simulator(policy, drafters, pass_seconds, token_ids=token_ids)
    for seq_id in range(4):
        simulator.add(text(seq_id))
        simulator.run(200)
    return [{seq_id: tuple(budget) for seq_id, budget in one.budgets.items()} for one in simulator.rounds]


def test_decisions_do_not_depend_on_the_values_of_tokens() -> None:
    """Non-anticipation: only how many draft tokens were accepted may matter, not which."""
    assert decisions(Random(1)) == decisions(Random(2))


SOURCES = sorted(Path(foredraft.policy.__file__).parent.glob("*.py"))
VALUES = {"token_probs", "ids", "probs", "prob_rows", "kept_ids", "laws", "logits", "proposal", "output_ids"}
LENGTHS_ONLY = {"new_ids", "tokens"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_policy_reads_what_was_drafted(source: Path) -> None:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    measured = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    }
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert not [node.attr for node in read if node.attr in VALUES]
    assert not [node.attr for node in read if node.attr in LENGTHS_ONLY and id(node) not in measured]
