"""Conversations to train on: the target answers questions, which a chat model can write itself. They are kept in a file, so that
none is written twice, however often the run is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.chat_template import render_chat, user_turn_frame
from foredraft.train.blocks import CountGiven
from foredraft.train.generations import BATCH_SIZE, WriteTexts, complete, seed_of, write_missing, writing_llm

FILE = "chats.jsonl"
_BATCHES_AT_ONCE = 2
_QUESTION_TEMPERATURE = 0.8  # at 1 a small model asks many unrealistic questions


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """number: of conversations. temperatures: of the answers, used in turn. question_tokens, answer_tokens: the most of each. seed: of
    the draws."""

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

    def begin() -> WriteTexts:
        return _Writer(writing_llm(target), questions, spec).chats

    return write_missing(out / FILE, spec.number, _BATCHES_AT_ONCE * BATCH_SIZE, begin, progress)


def question_counter(tokenizer: PreTrainedTokenizerBase) -> CountGiven:
    """-> a function that counts the tokens of a conversation before its answer; 0 for a text that is not a conversation"""
    _, closing = user_turn_frame(tokenizer)

    def count(text: Sequence[int]) -> int:
        ends = range(len(closing), len(text) + 1)
        return next((end for end in ends if list(text[end - len(closing) : end]) == closing), 0)

    return count


class QuestionWriter:
    """Lets a chat model write questions: it continues its template's opening of a user's turn. A question ends where the template ends
    that turn, or after max_tokens. opening, closing: what the template writes before and after a question.

    Raises ForedraftError for a model without a chat template.
    """

    def __init__(self, llm: LLM, max_tokens: int, seed: int = 0) -> None:
        assert llm.tokenizer is not None
        self._llm, self._max_tokens, self._seed = llm, max_tokens, seed
        self.opening, self.closing = user_turn_frame(llm.tokenizer)
        self._ends = {self.closing[0], llm.tokenizer.eos_token_id}

    def write(self, numbers: Sequence[int]) -> list[tuple[list[int], bool]]:
        """-> the ids of each question, and whether it ended by itself. numbers: those of the questions; each has draws of its own."""
        params = [self._params(number) for number in numbers]
        opened = complete(self._llm, [self.opening] * len(numbers), params)
        written = (text[len(self.opening) :] for text in opened)
        return [self._question(ids) for ids in written]

    def _params(self, number: int) -> SamplingParams:
        return SamplingParams(
            temperature=_QUESTION_TEMPERATURE,
            max_tokens=self._max_tokens,
            min_tokens=1,
            stop_token_ids=[self.closing[0]],
            seed=2 * seed_of(self._seed, number),
        )

    def _question(self, ids: Sequence[int]) -> tuple[list[int], bool]:
        length = next((place for place, token in enumerate(ids) if token in self._ends), len(ids))
        return list(ids[:length]), length < len(ids)


class _Writer:
    def __init__(self, llm: LLM, questions: Sequence[str], spec: ChatSpec) -> None:
        assert llm.tokenizer is not None
        self._llm, self._tokenizer, self._questions, self._spec = llm, llm.tokenizer, questions, spec
        self._question_writer = QuestionWriter(llm, spec.question_tokens, spec.seed)

    def chats(self, numbers: Sequence[int]) -> list[list[int]]:
        prompts = self._given(numbers) if self._questions else self._written(numbers)
        return complete(self._llm, prompts, [self._answer_params(number) for number in numbers])

    def _given(self, numbers: Sequence[int]) -> list[list[int]]:
        questions = [self._questions[number % len(self._questions)] for number in numbers]
        return [render_chat(self._tokenizer, [{"role": "user", "content": question}]) for question in questions]

    def _written(self, numbers: Sequence[int]) -> list[list[int]]:
        """Prompts with questions that the target writes."""
        writer = self._question_writer
        return [[*writer.opening, *question, *writer.closing] for question, _ in writer.write(numbers)]

    def _answer_params(self, number: int) -> SamplingParams:
        temperature = self._spec.temperatures[number % len(self._spec.temperatures)]
        return SamplingParams(
            temperature=temperature, max_tokens=self._spec.answer_tokens, seed=2 * seed_of(self._spec.seed, number) + 1
        )
