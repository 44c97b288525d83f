"""Which configuration runs what in which order, and that only times depend on it. Nothing here is timed."""

from __future__ import annotations

from itertools import count, groupby, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, ForedraftError, RequestError, SamplingParams
from foredraft.bench import BenchResult, Configuration, Question, Workload, run_bench
from foredraft.bench.configurations import Stopwatch, contenders_for
from foredraft.bench.records import GroupRun
from foredraft.bench.runner import hold_together, in_order, run_group
from foredraft.engine.stats import SpeculationStats
from foredraft.engine.step import Step

CONFIGURATIONS = [Configuration.plain(), Configuration("draft_model", 3), Configuration("suffix", 4)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = ["def area(width, height):", "Once upon a time there was", "import os\nimport re"]
TALK = Workload(
    "talk",
    (
        Question("a", "talk", ("Once upon a time", "Then she said", "And the dog"), is_chat=True),
        Question("b", "talk", ("def mean(values):",), is_chat=True),
        Question("c", "code", ("import os", "import re"), is_chat=True),
    ),
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1, seed=0)


@pytest.fixture(scope="module")
def result(llm: LLM) -> BenchResult:
    """The result of two repeats of three prompts with three configurations."""
    return run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), GREEDY, repeats=2)


def texts(result: BenchResult, name: str) -> list[list[tuple[int, ...]]]:
    return [[turn.token_ids for turn in answer.turns] for run in result.runs_of(name) for answer in run.answers]


def test_every_configuration_writes_what_the_llm_writes(llm: LLM, result: BenchResult) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    expected = [[tuple(output.outputs[0].token_ids)] for output in outputs for _ in range(2)]
    for name in result.names:
        assert texts(result, name) == expected
        identity = result.compare(name).identity
        assert identity is not None
        assert (identity.num_answers, identity.num_identical, identity.first_difference) == (6, 6, None)


def test_every_configuration_runs_a_group_before_the_next_begins(result: BenchResult) -> None:
    rounds = [list(runs) for _, runs in groupby(result.runs, key=lambda run: (run.repeat, run.group))]
    assert [(runs[0].repeat, runs[0].group) for runs in rounds] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert all({run.configuration for run in runs} == set(result.names) for runs in rounds)


@given(st.integers(1, 6))
def test_every_configuration_is_first_equally_often_and_follows_every_other(num: int) -> None:
    contenders: list[Any] = list(range(num))
    orders = [in_order(contenders, row) for row in range(2 * num)]
    assert all(sorted(order) == contenders for order in orders)
    assert all(sum(order[0] == one for order in orders) == 2 for one in contenders)
    if num > 2:
        before = {(a, b) for order in orders for a, b in pairwise(order)}
        assert all((one, (one + 1) % num) in before and ((one + 1) % num, one) in before for one in contenders)


class Places:
    """Observes several engines: which one wrote, and how far each had come."""

    def __init__(self, llms: list[LLM]) -> None:
        self.written = [0] * len(llms)
        self.order: list[int] = []
        self.apart: list[int] = []
        for number, llm in enumerate(llms):
            llm.engine.observers.append(_Place(self, number))


class _Place:
    def __init__(self, places: Places, number: int) -> None:
        self.places, self.number = places, number

    def observe(self, step: Step) -> None:
        self.places.written[self.number] += sum(step.num_kept)
        self.places.order.append(self.number)
        self.places.apart.append(max(self.places.written) - min(self.places.written))


def run_together(llm: LLM) -> tuple[Places, list[GroupRun]]:
    contenders = contenders_for(llm, CONFIGURATIONS)
    places = Places([contender.llm for contender in contenders])
    questions = Workload.of(PROMPTS[:1]).groups(1)[0]
    params = SamplingParams(max_tokens=40, temperature=0.0)
    together = hold_together(contenders, [questions], params)
    return places, run_group(contenders, questions, params, 0, 0, together=together)


def test_configurations_write_the_same_part_of_a_text_at_the_same_time(llm: LLM) -> None:
    places, runs = run_together(llm)
    assert [run.configuration for run in runs] == ["plain", "draft_model:3", "suffix:4"]
    assert max(places.apart) <= 5, "no further than a draft of four and a bonus token"


def test_without_memory_for_all_configurations_run_one_after_the_other(llm: LLM) -> None:
    small = LLM(num_threads=1, cache_memory=2 * 2**20)
    places, runs = run_together(small)
    assert [number for number, _ in groupby(places.order)] == [0, 1, 2]
    _, expected = run_together(llm)
    assert [run.answers[0].turns[0].token_ids for run in runs] == [
        run.answers[0].turns[0].token_ids for run in expected
    ]


def test_a_stopwatch_only_runs_in_its_own_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 20.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    stopwatch = Stopwatch()
    assert stopwatch.seconds() == 0.0
    with stopwatch:
        assert stopwatch.seconds() == 1.0
    assert stopwatch.seconds() == 3.0
    with stopwatch:
        pass
    assert stopwatch.seconds() == 7.0


def test_times_and_counts_of_a_turn_are_consistent(result: BenchResult) -> None:
    for run in result.runs:
        for answer in run.answers:
            for turn in answer.turns:
                assert turn.seconds == pytest.approx(turn.time_to_first_token + sum(turn.gaps))
                # there is a delivery for each step
                assert len(turn.gaps) + 1 == turn.stats.num_steps
                assert len(turn.token_ids) == turn.stats.num_emitted_tokens
        assert run.seconds == pytest.approx(sum(answer.seconds for answer in run.answers))


def test_counts_are_the_sums_over_the_requests(llm: LLM, result: BenchResult) -> None:
    """Except for drafters that learn across requests, whose drafts depend on the order."""
    for configuration in CONFIGURATIONS[:2]:
        own = llm.with_drafter(configuration.method, configuration.speculative_tokens)  # type: ignore[arg-type]
        outputs = [own.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
        own.engine.drop_retained()
        expected = sum((output.metrics.stats for output in outputs), SpeculationStats())
        assert result.figures(configuration.name).stats == expected + expected


def test_only_configurations_with_a_drafter_draft(result: BenchResult) -> None:
    drafted = {name: result.figures(name).stats.num_draft_tokens for name in result.names}
    assert drafted["plain"] == 0
    assert min(drafted["draft_model:3"], drafted["suffix:4"]) > 0


def test_nothing_is_left_behind(llm: LLM) -> None:
    llm.engine.drop_retained()
    run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), GREEDY, repeats=1)
    assert llm.engine.pool.used == 0


def test_no_run_finds_its_prompt_in_a_cache(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    start = type(llm.frontend).start

    def spy(frontend: Any, request: Any) -> None:
        held.append(frontend.engine.cache.bytes_retained)
        start(frontend, request)

    monkeypatch.setattr(type(llm.frontend), "start", spy)
    run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS[:1]), GREEDY, repeats=2)
    assert held == [0] * len(CONFIGURATIONS) * 3


def test_a_later_turn_sees_the_previous_answers(llm: LLM) -> None:
    assert llm.tokenizer is not None
    found = run_bench(llm, CONFIGURATIONS, TALK, GREEDY, repeats=1)
    questions = {question.question_id: question for question in TALK.questions}
    for run in found.runs:
        for answer in run.answers:
            said = ""
            for text, turn in zip(questions[answer.question_id].turns, answer.turns, strict=True):
                said += text
                assert turn.prompt_len == len(llm.tokenizer(said)["input_ids"])
                said += llm.tokenizer.decode(turn.token_ids) + "\n\n"
    assert found.figures("plain").num_tokens == 6 * 12
    assert all(found.compare(name).identity.share == 1.0 for name in found.names)  # type: ignore[union-attr]


def test_turns_use_the_chat_template_if_there_is_one() -> None:
    llm = LLM(num_threads=1)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    found = run_bench(llm, CONFIGURATIONS[:1], TALK.first(1), GREEDY, repeats=1)
    first, second, _ = found.runs[0].answers[0].turns
    answer = llm.tokenizer.decode(first.token_ids)
    asked = "<user>Once upon a time\n<assistant>"
    again = f"{asked}{answer}\n<user>Then she said\n<assistant>"
    expected = [len(llm.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (asked, again)]
    assert [first.prompt_len, second.prompt_len] == expected
    plain = run_bench(llm, CONFIGURATIONS[:1], Workload.of(["Once upon a time"]), GREEDY, repeats=1)
    assert plain.runs[0].answers[0].turns[0].prompt_len == len(llm.tokenizer("Once upon a time")["input_ids"])


def test_batches_of_every_size_write_the_same(llm: LLM) -> None:
    configurations = [Configuration("draft_model", 3, size) for size in (1, 2, 3)]
    found = run_bench(llm, configurations, TALK, GREEDY, repeats=1)
    assert [run.category for run in found.runs_of(found.baseline)] == ["mixed"]
    for name in found.names:
        assert texts(found, name) == texts(found, found.baseline)
    for run in found.runs_of("draft_model:3@3"):
        assert run.seconds >= max(answer.seconds for answer in run.answers) * 0.999


def test_seeded_texts_agree_and_unseeded_ones_are_not_compared(llm: LLM) -> None:
    seeded = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    found = run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), seeded, repeats=1)
    assert all(found.compare(name).identity.share == 1.0 for name in found.names)  # type: ignore[union-attr]
    unseeded = SamplingParams(max_tokens=12, temperature=0.9)
    found = run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), unseeded, repeats=1)
    assert [found.compare(name).identity for name in found.names] == [None, None, None]


def test_a_differing_text_is_found(llm: LLM) -> None:
    found = run_bench(llm, CONFIGURATIONS[:2], Workload.of(PROMPTS[:1]), GREEDY, repeats=1)
    (run,) = found.runs_of("draft_model:3")
    turn = run.answers[0].turns[0]
    object.__setattr__(turn, "token_ids", (*turn.token_ids[:5], turn.token_ids[5] + 1, *turn.token_ids[6:]))
    identity = found.compare("draft_model:3").identity
    assert identity is not None
    assert (identity.num_answers, identity.num_identical) == (1, 0)
    assert identity.first_difference is not None
    assert (identity.first_difference.question_id, identity.first_difference.position) == ("1", 5)
    assert identity.first_difference.ours == turn.token_ids[5]


def test_with_a_spent_budget_one_group_still_runs_with_two_configurations(llm: LLM) -> None:
    found = run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), GREEDY, budget=0.001)
    assert [run.group for run in found.runs] == [0, 0]
    assert {run.configuration for run in found.runs} == set(found.names) == {one.name for one in CONFIGURATIONS[:2]}
    said = " ".join(found.cut)
    assert f"skipped, because the budget was used up: {CONFIGURATIONS[2].name}" in said
    assert f"1 of {len(PROMPTS)} questions" in said


@pytest.mark.parametrize("batch_size", [1, 3])
def test_on_a_slow_machine_work_is_cut_to_keep_the_budget(llm: LLM, batch_size: int) -> None:
    """Each reading of the clock is ten seconds later."""
    looks = count()
    configurations = [Configuration.plain(batch_size), *(Configuration("suffix", g, batch_size) for g in (1, 2, 3, 4))]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    found = run_bench(llm, configurations, Workload.of(PROMPTS), params, budget=60.0, now=lambda: 10.0 * next(looks))
    assert found.names[0] == configurations[0].name
    assert 2 <= len(found.names) < len(configurations)
    assert all(len(found.runs_of(name)) == len(found.runs_of(found.baseline)) for name in found.names)
    assert all(one.name in found.cut[0] for one in configurations if one.name not in found.names)


def test_with_a_sufficient_budget_nothing_is_cut(llm: LLM) -> None:
    found = run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), GREEDY, budget=600.0, repeats=1)
    assert found.names == [one.name for one in CONFIGURATIONS]
    assert found.cut == ()
    assert found.params.max_tokens == GREEDY.max_tokens


def test_a_round_that_ends_too_late_is_discarded(llm: LLM) -> None:
    """The machine is busy in the second round: its runs are discarded, and only the first round counts."""
    rounds, seconds = 0, 0.0

    def show(_: float) -> None:
        nonlocal rounds, seconds
        rounds += 1
        seconds = 100.0 if rounds > 1 else 0.0

    found = run_bench(
        llm, CONFIGURATIONS[:2], Workload.of(PROMPTS), GREEDY, budget=50.0, progress=show, now=lambda: seconds
    )
    assert [run.group for run in found.runs] == [0, 0]
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0


def test_a_budget_is_spent_on_repeats_up_to_their_maximum(llm: LLM) -> None:
    found = run_bench(llm, CONFIGURATIONS[:1], Workload.of(PROMPTS[:1]), GREEDY, budget=600.0, repeats=4)
    assert [run.repeat for run in found.runs] == [0, 1, 2, 3]


def test_progress_goes_from_0_to_1(llm: LLM) -> None:
    shares: list[float] = []
    run_bench(llm, CONFIGURATIONS[:1], Workload.of(PROMPTS), GREEDY, repeats=2, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0


def test_the_default_configurations_are_plain_decoding_and_the_llm_itself(llm: LLM) -> None:
    found = run_bench(llm, workload=Workload.of(PROMPTS[:1]), params=GREEDY)
    assert found.names == ["plain", f"{llm.method}:{llm.speculative_tokens}"]
    assert len(found.runs) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"params": SamplingParams(n=2)}, "n must be 1"),
        ({"params": SamplingParams(max_tokens=None)}, "needs max_tokens"),
        ({"params": SamplingParams(stop="\n")}, "leave out stop"),
        ({"budget": -1.0}, "budget must be more than 0 seconds"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"params": SamplingParams(max_tokens=800)}, "question a: its turns and their answers may take"),
        ({"workload": Workload.of(["x " * 3000])}, "question 1: the prompt has"),
    ],
)
def test_impossible_measurements_are_refused_before_anything_runs(
    llm: LLM, settings: dict[str, Any], words: str
) -> None:
    steps = llm.engine.stats.num_steps
    with pytest.raises(ForedraftError, match=words):
        run_bench(llm, CONFIGURATIONS, **{"workload": TALK, **settings})
    assert llm.engine.stats.num_steps == steps


def test_unmeasured_configurations_are_refused_by_name(result: BenchResult) -> None:
    with pytest.raises(ForedraftError, match="'ngram:3' was not measured: choose from plain, "):
        result.figures("ngram:3")
    with pytest.raises(ForedraftError, match="category 'math' was not measured: choose from prompts"):
        result.compare("plain", "math")


def test_a_failed_request_ends_the_benchmark_and_leaves_nothing(llm: LLM) -> None:
    def fail(prefix: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("oops")

    params = SamplingParams(max_tokens=4, temperature=0.0, logits_processors=[fail])
    with pytest.raises(RequestError, match="oops"):
        run_bench(llm, CONFIGURATIONS, Workload.of(PROMPTS), params)
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0
