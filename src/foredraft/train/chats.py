"""Conversations to train on: the target answers questions, which a chat model can write itself. They are kept in a file, so that
none is written twice however often the run is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.chat_template import render_chat, user_turn_frame
from foredraft.train.generations import append_texts, read_texts

FILE = "chats.jsonl"
_BATCH_SIZE = 64
_BATCHES_AT_ONCE = 2
_QUESTION_TEMPERATURE = 0.8  # at 1 a small model asks much that nobody would


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """number: of conversations. temperatures: of the answers, used in turn. question_tokens, answer_tokens: at most. seed: of the
    draws."""

    number: int
    temperatures: tuple[float, ...]
    question_tokens: int
    answer_tokens: int
    seed: int = 0


def write_chats(
    target: str, questions: Sequence[str], spec: ChatSpec, out: Path, progress: Callable[[float], None]
) -> list[list[int]]:
    """-> the ids of each conversation, under the target's chat template. questions: used in turn; without any, the target
    continues the template's opening of a user's turn. Conversations that the file in `out` already holds are not written again.

    Raises ForedraftError for a target without a chat template.
    """
    chats = read_texts(out / FILE)[: spec.number]
    if len(chats) == spec.number:
        return chats
    llm = LLM(target, method="none", max_num_seqs=_BATCH_SIZE)  # as it will serve, in its fastest format
    writer = _Writer(llm, questions, spec)
    while len(chats) < spec.number:
        new = writer.chats(range(len(chats), min(len(chats) + _BATCH_SIZE * _BATCHES_AT_ONCE, spec.number)))
        append_texts(out / FILE, new)
        chats += new
        progress(len(chats) / spec.number)
    return chats


class _Writer:
    """Each conversation has seeds of its own, so it is the same in any batch."""

    def __init__(self, llm: LLM, questions: Sequence[str], spec: ChatSpec) -> None:
        assert llm.tokenizer is not None
        self._llm, self._tokenizer, self._questions, self._spec = llm, llm.tokenizer, questions, spec
        self._opening, self._closing = user_turn_frame(llm.tokenizer)

    def chats(self, numbers: Sequence[int]) -> list[list[int]]:
        prompts = self._given(numbers) if self._questions else self._written(numbers)
        params = [self._answer_params(number) for number in numbers]
        answers = self._complete(prompts, params)
        return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]

    def _given(self, numbers: Sequence[int]) -> list[list[int]]:
        questions = [self._questions[number % len(self._questions)] for number in numbers]
        return [render_chat(self._tokenizer, [{"role": "user", "content": question}]) for question in questions]

    def _written(self, numbers: Sequence[int]) -> list[list[int]]:
        """Questions that the target writes. One ends where the template ends a user's turn."""
        params = [self._question_params(number) for number in numbers]
        written = self._complete([self._opening] * len(numbers), params)
        questions = [list(self._before_the_end(question)) for question in written]
        return [[*self._opening, *question, *self._closing] for question in questions]

    def _complete(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        outputs = self._llm.generate(list(prompts), list(params))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _question_params(self, number: int) -> SamplingParams:
        return SamplingParams(
            temperature=_QUESTION_TEMPERATURE,
            max_tokens=self._spec.question_tokens,
            min_tokens=1,
            stop_token_ids=[self._closing[0]],
            seed=2 * self._seed(number),
        )

    def _answer_params(self, number: int) -> SamplingParams:
        temperature = self._spec.temperatures[number % len(self._spec.temperatures)]
        return SamplingParams(
            temperature=temperature, max_tokens=self._spec.answer_tokens, seed=2 * self._seed(number) + 1
        )

    def _seed(self, number: int) -> int:
        return self._spec.seed * 1_000_003 + number

    def _before_the_end(self, ids: Sequence[int]) -> Iterator[int]:
        ends = {self._closing[0], self._tokenizer.eos_token_id}
        for token in ids:
            if token in ends:
                return
            yield token
