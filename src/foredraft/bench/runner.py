"""Runs every configuration on every group of questions, taking turns step by step: other load on the machine affects all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar, overload

from foredraft.bench.budget import Clock, Now, affordable_tokens, describe_cuts
from foredraft.bench.built_in import built_in_workload
from foredraft.bench.configurations import Configuration, Contender, contenders_for, default_configurations
from foredraft.bench.environment import Environment
from foredraft.bench.failures import failure_warnings
from foredraft.bench.records import Answer, GroupRun, Turn
from foredraft.bench.result import BenchResult
from foredraft.bench.workload import Question, Workload, category_of
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.frontend import raise_first_failure
from foredraft.text.request import Prompt, Request
from foredraft.utils.arguments import check_budget

DEFAULT_TOKENS = 128
_WARM_UP_TOKENS = 16
_BETWEEN_TURNS = "\n\n"


def run_bench(
    llm: LLM,
    configurations: Sequence[Configuration] | None = None,
    workload: Workload | None = None,
    params: SamplingParams | None = None,
    *,
    budget: float | None = None,
    repeats: int | None = None,
    progress: Callable[[float], None] | None = None,
    least: int = 2,
    now: Now = time.perf_counter,
) -> BenchResult:
    """Measure configurations against each other, on the models of `llm`.

    configurations: the first is the baseline; None uses plain decoding and `llm` as it is.
    workload: None uses the built-in prompts. params: for every request; None is greedy, 128 tokens. Its
        speculative_tokens are ignored: each configuration has its own.
    budget: seconds, warm-up included. Questions are repeated until another round would exceed it. If it is too short for
        one pass, questions are left out, but never the first group. If it is too short even for that, texts are shortened
        and the last configurations left out, but never the first `least`; `cut` of the result lists all this.
    repeats: the most passes. Without budget and repeats: one pass.
    now: the clock of the budget. progress: called now and then with the share that is done, 0 to 1.

    Raises ForedraftError before anything is measured if a configuration or a question cannot run, and RequestError if a
    request fails.
    """
    requested = replace(params or SamplingParams(max_tokens=DEFAULT_TOKENS, temperature=0.0), speculative_tokens=None)
    check_settings(requested, budget, repeats)
    workload = workload or built_in_workload(of_sources=llm.target.has_encoder)
    contenders = contenders_for(llm, default_configurations() if configurations is None else configurations)
    check_fits(llm, workload, requested)
    groups = workload.groups(max(contender.configuration.batch_size for contender in contenders))
    clock = Clock(budget, 1 if budget is None and repeats is None else repeats, len(groups), progress, now)
    together = hold_together(contenders, groups, requested)
    least = min(max(least, 1), len(contenders))
    params = fit_to_budget(contenders, groups[0], requested, clock, least)
    measured, runs = _run_rounds(contenders, groups, params, clock, least, together=together)
    return BenchResult(
        configurations=tuple(contender.configuration for contender in measured),
        cut=_cut(contenders, runs, workload, requested, params),
        workload=workload,
        params=params,
        # without a temperature, the checkpoint's own applies
        is_promised=params.seed is not None or llm.frontend.prepare([0], params).params.is_greedy,
        are_together=together,
        environment=Environment.of(llm),
        runs=tuple(runs),
        warnings=tuple(line for one in contenders for line in failure_warnings(one.llm.fallbacks, one.name)),
    )


def _run_rounds(
    contenders: Sequence[Contender],
    groups: Sequence[Sequence[Question]],
    params: SamplingParams,
    clock: Clock,
    least: int,
    *,
    together: bool,
) -> tuple[list[Contender], list[GroupRun]]:
    """Run rounds until the budget or the repeats are used up. If the first round takes too long, only the first `least`
    contenders go on. -> the contenders that were measured, and their runs"""
    measured, runs = list(contenders), list[GroupRun]()
    for repeat, index in clock.rounds():
        order = in_order(measured, index + repeat * len(groups))
        keep = None if runs else least
        new = run_group(order, groups[index], params, index, repeat, together=together, clock=clock, keep=keep)
        if new is None:
            break
        names = {run.configuration for run in new}
        measured = [contender for contender in measured if contender.name in names]
        runs += new
    return measured, runs


def _cut(
    contenders: Sequence[Contender],
    runs: Sequence[GroupRun],
    workload: Workload,
    requested: SamplingParams,
    params: SamplingParams,
) -> tuple[str, ...]:
    """What the budget had no room for, one line each. requested: the parameters before texts were shortened."""
    names = {run.configuration for run in runs}
    num_answered = len({answer.question_id for run in runs for answer in run.answers})
    return describe_cuts(
        [contender.name for contender in contenders if contender.name not in names],
        (requested.max_tokens or 0, len(workload.questions)),
        (params.max_tokens or 0, num_answered),
    )


def check_settings(params: SamplingParams, budget: float | None, repeats: int | None) -> None:
    if params.n != 1:
        raise ForedraftError(f"a benchmark generates one text per prompt: n must be 1, not {params.n}")
    if params.stop_strings:
        raise ForedraftError(
            "a benchmark counts every token that is generated, but stop strings cut some off: leave out stop"
        )
    if params.max_tokens is None:
        raise ForedraftError("a benchmark needs max_tokens: without it a text may fill the context")
    check_budget(budget)
    if repeats is not None and repeats < 1:
        raise ForedraftError(f"repeats must be at least 1, not {repeats}")


T = TypeVar("T")


def in_order(contenders: Sequence[T], row: int) -> list[T]:
    """Rotate the order, and reverse it after each full rotation, so that no contender always follows the same other one."""
    laps, shift = divmod(row, len(contenders))
    order = [*contenders[shift:], *contenders[:shift]]
    return order[::-1] if laps % 2 else order


def check_fits(llm: LLM, workload: Workload, params: SamplingParams) -> None:
    context_len = llm.target.traits.context_len
    for question in workload.questions:
        try:
            longest = _longest(llm, question, params)
        except ForedraftError as error:
            raise type(error)(f"question {question.question_id}: {error}") from error
        if longest > context_len:
            raise ForedraftError(
                f"question {question.question_id}: its turns and their answers may take {longest} tokens, but the "
                f"context holds {context_len}: lower max_tokens, or leave the question out"
            )


def _longest(llm: LLM, question: Question, params: SamplingParams) -> int:
    """The most tokens that the question's turns and their answers may take."""
    prompt = _prompt(llm, question, [""] * (len(question.turns) - 1))
    return len(llm.frontend.prepare(prompt, params).prompt_ids) + (params.max_tokens or 0) * len(question.turns)


def _prompt(llm: LLM, question: Question, answers: Sequence[str]) -> Prompt:
    """The prompt of the next turn: the turns so far with the answers between them."""
    turns = question.turns[: len(answers) + 1]
    if question.is_chat and llm.tokenizer is not None and llm.tokenizer.chat_template:
        messages: list[dict[str, Any]] = []
        for turn, answer in zip(turns, [*answers, None], strict=True):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return llm.chat_prompt(messages)
    said = [turn + answer for turn, answer in zip(turns, [*answers, ""], strict=True)]
    return _BETWEEN_TURNS.join(said)


def fit_to_budget(
    contenders: Sequence[Contender], questions: Sequence[Question], params: SamplingParams, clock: Clock, least: int
) -> SamplingParams:
    """Warm up. -> params, with texts short enough that one round of the first `least` contenders fits the rest of the budget"""
    warm_up(contenders, questions, params)
    if clock.budget is None or params.max_tokens is None:
        return params
    before = clock.spent
    num_tried = warm_up(contenders[:least], questions, params)
    tokens = affordable_tokens(params.max_tokens, num_tried, clock.spent - before, clock.budget - clock.spent)
    return replace(params, max_tokens=tokens, min_tokens=min(params.min_tokens, tokens))


def warm_up(contenders: Sequence[Contender], questions: Sequence[Question], params: SamplingParams) -> int:
    """-> the most tokens of each text"""
    few = min(params.max_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    run_group(contenders, questions, replace(params, min_tokens=0, max_tokens=few), 0, 0, together=False)
    return few


@overload
def run_group(
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    params: SamplingParams,
    index: int,
    repeat: int,
    *,
    together: bool,
) -> list[GroupRun]: ...


@overload
def run_group(
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    params: SamplingParams,
    index: int,
    repeat: int,
    *,
    together: bool,
    clock: Clock,
    keep: int | None,
) -> list[GroupRun] | None: ...


def run_group(
    contenders: Sequence[Contender],
    questions: Sequence[Question],
    params: SamplingParams,
    index: int,
    repeat: int,
    *,
    together: bool,
    clock: Clock | None = None,
    keep: int | None = None,
) -> list[GroupRun] | None:
    """Run one group under every configuration, once.

    index, repeat: which of the groups, and how often it ran before. together: whether contenders take turns (see hold_together):
    the one with the fewest tokens takes the next step, so that all are at the same place in the text; otherwise they run one
    after the other. clock: if its budget is overdrawn, the round is given up and the result is None; with keep, the first
    `keep` contenders finish the round, and the result has their runs.
    """
    running = [_run(contender, questions, params, index, repeat) for contender in contenders]
    is_late = _never if clock is None else lambda: clock.is_overdrawn
    if together:
        return _in_turn(running, is_late, keep)
    found: list[GroupRun] = []
    for number, one in enumerate(running):
        must_run = keep is not None and number < keep
        run = _in_turn([one], _never if must_run else is_late, None if keep is None else 0)
        if run is None:
            return None
        found += run
    return found


def _never() -> bool:
    return False


def hold_together(
    contenders: Sequence[Contender], groups: Sequence[Sequence[Question]], params: SamplingParams
) -> bool:
    """Whether the cache memory can hold any group's texts for all contenders, and for draft models as large as the target, with
    room to spare."""
    llm = contenders[0].llm
    available = llm.engine.pool.total // 2

    def holds(questions: Sequence[Question]) -> bool:
        longest = max(_longest(llm, question, params) for question in questions)
        num_texts = sum(min(contender.configuration.batch_size, len(questions)) for contender in contenders)
        return 2 * num_texts * llm.engine.cache.bytes_for(longest) <= available

    return all(holds(questions) for questions in groups)


T_co = TypeVar("T_co", covariant=True)
Steps = Generator[int, None, T_co]
"""A run as a generator: it yields the number of tokens of each step, and returns its result."""


def _in_turn(
    running: Sequence[Steps[GroupRun]], is_late: Callable[[], bool] = _never, keep: int | None = None
) -> list[GroupRun] | None:
    """Take turns. keep: how many of the first go on once is_late(); None: none does, and the result is None."""
    num_tokens, runs = dict.fromkeys(running, 0), dict[Steps[GroupRun], GroupRun]()
    try:
        while num_tokens:
            if is_late():
                if keep is None:
                    return None
                num_tokens = {one: num for one, num in num_tokens.items() if one in running[:keep]}
                is_late = _never
                continue
            least = min(num_tokens, key=num_tokens.__getitem__)
            try:
                num_tokens[least] += next(least)
            except StopIteration as end:
                runs[least] = end.value
                del num_tokens[least]
    finally:
        for one in running:
            one.close()
    return [runs[one] for one in running if one in runs]


def _run(
    contender: Contender, questions: Sequence[Question], params: SamplingParams, index: int, repeat: int
) -> Steps[GroupRun]:
    size, engine = contender.configuration.batch_size, contender.llm.engine
    # a run must not profit from another run's cache, but the turns of one conversation may share a prefix
    engine.drop_retained()
    seconds, answers = 0.0, []
    for start in range(0, len(questions), size):
        took, some = yield from _ask(contender, questions[start : start + size], params)
        seconds += took
        answers += some
    engine.drop_retained()
    return GroupRun(contender.name, index, repeat, category_of(questions), seconds, tuple(answers))


def _ask(
    contender: Contender, questions: Sequence[Question], params: SamplingParams
) -> Steps[tuple[float, list[Answer]]]:
    """All turns of questions that run together: the next turns begin once all current ones have ended."""
    seconds = 0.0
    texts: list[list[str]] = [[] for _ in questions]
    turns: list[list[Turn]] = [[] for _ in questions]
    for number in range(max(len(question.turns) for question in questions)):
        asked = [i for i, question in enumerate(questions) if number < len(question.turns)]
        prompts = [_prompt(contender.llm, questions[i], texts[i]) for i in asked]
        took, written = yield from _write(contender, prompts, params)
        seconds += took
        for i, (turn, text) in zip(asked, written, strict=True):
            turns[i].append(turn)
            texts[i].append(text)
    return seconds, [Answer(q.question_id, q.category, tuple(own)) for q, own in zip(questions, turns, strict=True)]


def _write(
    contender: Contender, prompts: Sequence[Prompt], params: SamplingParams
) -> Steps[tuple[float, list[tuple[Turn, str]]]]:
    """Run one batch. -> seconds of its stopwatch, and each prompt's turn and text"""
    llm, stopwatch = contender.llm, contender.stopwatch
    texts = [_Deliveries(llm.frontend.prepare(prompt, params)) for prompt in prompts]
    requests = [text.request for text in texts]
    started = stopwatch.seconds()
    with closing(llm.frontend.steps(requests, timer=stopwatch)) as steps:
        for _ in steps:
            yield sum(text.look(stopwatch.seconds()) for text in texts)
    raise_first_failure(requests)
    ended = max(text.times[-1] for text in texts)
    return ended - started, [text.written(started) for text in texts]


@dataclass(slots=True)
class _Deliveries:
    """The times at which a request's steps delivered tokens. The request has one text."""

    request: Request
    times: list[float] = field(default_factory=list)
    num_seen: int = 0

    def look(self, now: float) -> int:
        """-> the number of new tokens"""
        num_new = sum(sequence.num_output for sequence in self.request.sequences) - self.num_seen
        if num_new:
            self.num_seen += num_new
            self.times.append(now)
        return num_new

    def written(self, started: float) -> tuple[Turn, str]:
        sequence = self.request.sequences[0]
        turn = Turn(
            prompt_len=sequence.prompt_len,
            token_ids=tuple(sequence.output_ids),
            finish_reason=sequence.finish_reason,
            seconds=self.times[-1] - started,
            time_to_first_token=self.times[0] - started,
            gaps=tuple(b - a for a, b in pairwise(self.times)),
            stats=sequence.stats,
        )
        return turn, self.request.output().outputs[0].text
