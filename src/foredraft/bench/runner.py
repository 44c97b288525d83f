"""Every configuration on every group of questions, in alternation, so that what the machine does meanwhile meets all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, TypeVar

from foredraft.bench.built_in import built_in_workload
from foredraft.bench.configurations import Configuration, Contender, contenders_for, default_configurations
from foredraft.bench.environment import Environment
from foredraft.bench.records import Answer, GroupRun, Turn
from foredraft.bench.result import BenchResult
from foredraft.bench.workload import Question, Workload, category_of
from foredraft.errors import ForedraftError, RequestError
from foredraft.llm import LLM
from foredraft.request import Prompt, Request
from foredraft.sampling import SamplingParams

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
) -> BenchResult:
    """Measure configurations against each other, over the models of `llm`.

    configurations: the first is what the others are compared with; None takes plain decoding and `llm` as it is.
    workload: None takes the built-in prompts. params: for every request; None is greedy, 128 tokens. Its
        speculative_tokens are each configuration's own.
    budget: seconds; the questions are asked again until another round would exceed it, and not all are asked where it is
        too short for one pass (the result says how many), but one group is. repeats: the most passes. Neither: one pass.
    progress: called with the share that is done, 0 to 1, now and then.

    Raises ForedraftError before anything is measured if a configuration or a question cannot run, and RequestError if a
    request fails on the way.
    """
    params = replace(params or SamplingParams(max_tokens=DEFAULT_TOKENS, temperature=0.0), speculative_tokens=None)
    check_settings(params, budget, repeats)
    workload = workload or built_in_workload()
    contenders = contenders_for(llm, default_configurations() if configurations is None else configurations)
    check_fits(llm, workload, params)
    groups = workload.groups(max(contender.configuration.batch_size for contender in contenders))
    clock = _Clock(budget, 1 if budget is None and repeats is None else repeats, len(groups), progress)
    warm_up(contenders, groups[0], params)
    runs: list[GroupRun] = []
    for repeat, index in clock.rounds():
        order = in_order(contenders, index + repeat * len(groups))
        runs += [run_group(contender, groups[index], params, index, repeat) for contender in order]
    return BenchResult(
        configurations=tuple(contender.configuration for contender in contenders),
        workload=workload,
        params=params,
        # with the checkpoint's own temperature where there is none
        is_promised=params.seed is not None or llm.frontend.prepare([0], params).params.is_greedy,
        environment=Environment.of(llm),
        runs=tuple(runs),
    )


def check_settings(params: SamplingParams, budget: float | None, repeats: int | None) -> None:
    if params.n != 1:
        raise ForedraftError(f"a benchmark writes one text for a prompt: n must be 1, not {params.n}")
    if params.stop_strings:
        raise ForedraftError(
            "a benchmark counts every token that is written, and stop strings cut some: leave stop out"
        )
    if params.max_tokens is None:
        raise ForedraftError("a benchmark needs max_tokens: without it a text may fill the context")
    if budget is not None and budget < 0:
        raise ForedraftError(f"budget must be 0 seconds or more, not {budget}")
    if repeats is not None and repeats < 1:
        raise ForedraftError(f"repeats must be at least 1, not {repeats}")


@dataclass(slots=True)
class _Clock:
    """When to stop. budget: seconds, from the first round on. repeats: passes over all groups."""

    budget: float | None
    repeats: int | None
    num_groups: int
    progress: Callable[[float], None] | None
    _durations: list[float] = field(default_factory=list)

    def rounds(self) -> Iterator[tuple[int, int]]:
        """(repeat, group): every configuration runs the group before the next round begins."""
        started = time.perf_counter()
        for number in count():
            repeat, group = divmod(number, self.num_groups)
            spent = time.perf_counter() - started
            is_over = self._is_over(repeat, spent)
            if self.progress is not None:
                self.progress(1.0 if is_over else self._share(number, spent))
            if is_over:
                return
            yield repeat, group
            self._durations.append(time.perf_counter() - started - spent)

    def _is_over(self, repeat: int, spent: float) -> bool:
        if self.repeats is not None and repeat >= self.repeats:
            return True
        return self.budget is not None and bool(self._durations) and spent + self._durations[-1] > self.budget

    def _share(self, number: int, spent: float) -> float:
        by_time = spent / self.budget if self.budget else 0.0
        by_count = number / (self.repeats * self.num_groups) if self.repeats else 0.0
        return min(1.0, max(by_time, by_count))


T = TypeVar("T")


def in_order(contenders: Sequence[T], row: int) -> list[T]:
    """Who begins rotates, and the direction turns with each full rotation, so that nobody always follows the same one."""
    laps, shift = divmod(row, len(contenders))
    order = [*contenders[shift:], *contenders[:shift]]
    return order[::-1] if laps % 2 else order


def check_fits(llm: LLM, workload: Workload, params: SamplingParams) -> None:
    context_len = llm.target.traits.context_len
    for question in workload.questions:
        prompt = _prompt(llm, question, [""] * (len(question.turns) - 1))
        try:
            num_prompt = len(llm.frontend.prepare(prompt, params).prompt_ids)
        except ForedraftError as error:
            raise type(error)(f"question {question.question_id}: {error}") from error
        longest = num_prompt + (params.max_tokens or 0) * len(question.turns)
        if longest > context_len:
            raise ForedraftError(
                f"question {question.question_id}: its turns and their answers may take {longest} tokens and the context "
                f"holds {context_len}: lower max_tokens, or leave it out"
            )


def _prompt(llm: LLM, question: Question, answers: Sequence[str]) -> Prompt:
    """The turns so far with their answers between them."""
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


def warm_up(contenders: Sequence[Contender], questions: Sequence[Question], params: SamplingParams) -> None:
    few = min(params.max_tokens or _WARM_UP_TOKENS, _WARM_UP_TOKENS)
    for contender in contenders:
        run_group(contender, questions, replace(params, min_tokens=0, max_tokens=few), 0, 0)


def run_group(
    contender: Contender, questions: Sequence[Question], params: SamplingParams, index: int, repeat: int
) -> GroupRun:
    """One group under one configuration, once. index, repeat: which of the groups, and for the how many-th time."""
    size, engine = contender.configuration.batch_size, contender.llm.engine
    # what one run leaves behind must not help the next; the turns of one conversation do share their beginning
    engine.drop_retained()
    seconds, answers = 0.0, []
    for start in range(0, len(questions), size):
        took, some = _ask(contender.llm, questions[start : start + size], params)
        seconds += took
        answers += some
    engine.drop_retained()
    return GroupRun(contender.name, index, repeat, category_of(questions), seconds, tuple(answers))


def _ask(llm: LLM, questions: Sequence[Question], params: SamplingParams) -> tuple[float, list[Answer]]:
    """All turns of questions that run together: the next turns begin when all have ended."""
    seconds = 0.0
    texts: list[list[str]] = [[] for _ in questions]
    turns: list[list[Turn]] = [[] for _ in questions]
    for number in range(max(len(question.turns) for question in questions)):
        asked = [i for i, question in enumerate(questions) if number < len(question.turns)]
        took, written = _write(llm, [_prompt(llm, questions[i], texts[i]) for i in asked], params)
        seconds += took
        for i, (turn, text) in zip(asked, written, strict=True):
            turns[i].append(turn)
            texts[i].append(text)
    return seconds, [Answer(q.question_id, q.category, tuple(own)) for q, own in zip(questions, turns, strict=True)]


def _write(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[float, list[tuple[Turn, str]]]:
    """One batch. -> seconds of the clock, and each prompt's turn and text"""
    watches = [_Watch(llm.frontend.prepare(prompt, params)) for prompt in prompts]
    started = time.perf_counter()
    try:
        for watch in watches:
            llm.frontend.start(watch.request)
        while not all(watch.request.is_finished for watch in watches):
            llm.engine.step()
            now = time.perf_counter()
            for watch in watches:
                watch.look(now)
    finally:
        for watch in watches:
            llm.frontend.abort(watch.request)
    failed = next((watch.request for watch in watches if watch.request.error), None)
    if failed is not None:
        raise RequestError(f"request {failed.request_id}: {failed.error}", [failed.output()])
    ended = max(watch.deliveries[-1] for watch in watches)
    return ended - started, [watch.written(started) for watch in watches]


@dataclass(slots=True)
class _Watch:
    """When each of a request's steps delivered. A request has one text."""

    request: Request
    deliveries: list[float] = field(default_factory=list)
    num_seen: int = 0

    def look(self, now: float) -> None:
        num_output = self.request.sequences[0].num_output
        if num_output > self.num_seen:
            self.num_seen = num_output
            self.deliveries.append(now)

    def written(self, started: float) -> tuple[Turn, str]:
        sequence = self.request.sequences[0]
        turn = Turn(
            prompt_len=sequence.prompt_len,
            token_ids=tuple(sequence.output_ids),
            finish_reason=sequence.finish_reason,
            seconds=self.deliveries[-1] - started,
            time_to_first_token=self.deliveries[0] - started,
            gaps=tuple(b - a for a, b in pairwise(self.deliveries)),
            stats=sequence.stats,
        )
        return turn, self.request.output().outputs[0].text
