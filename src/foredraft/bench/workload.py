"""The questions of a benchmark, of one turn or several, by category."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from foredraft.errors import ForedraftError

_UNNAMED, _MIXED = "prompts", "mixed"


@dataclass(frozen=True, slots=True)
class Question:
    """turns: the prompts, one after the other; each turn sees the answers before it.

    is_chat: whether the turns are a user's messages, for the model's chat template if it has one; otherwise they are texts
    that the model continues.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """name: for the report. questions: at least one, with distinct ids."""

    name: str
    questions: tuple[Question, ...]

    def __post_init__(self) -> None:
        if not self.questions:
            raise ForedraftError(f"{self.name} contains no questions: give at least one")
        seen: set[str] = set()
        for question in self.questions:
            if question.question_id in seen:
                raise ForedraftError(
                    f"{self.name}: question_id {question.question_id} occurs twice: give each question its own"
                )
            seen.add(question.question_id)

    @classmethod
    def of(cls, prompts: Sequence[str], name: str = _UNNAMED) -> Workload:
        """A workload of texts to be continued, in one category."""
        return cls(name, tuple(Question(str(i), _UNNAMED, (prompt,)) for i, prompt in enumerate(prompts, start=1)))

    @classmethod
    def parse(cls, text: str, name: str) -> Workload:
        """JSON lines as Spec-Bench and MT-bench have them: `turns` (a list of strings) or `prompt` (a string), and
        optionally `question_id` and `category`. Other fields are ignored.

        name: of the file, for messages and the report. Raises ForedraftError, naming the line.
        """
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        return cls(name, tuple(_question(line, number, f"{name}, line {number}") for number, line in lines))

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(question.category for question in self.questions))

    def first(self, count: int) -> Workload:
        """This many questions, taken from the categories in turn, so that a few questions cover many categories."""
        if count < 1:
            raise ForedraftError(f"a workload needs at least 1 question, not {count}")
        chosen = chain.from_iterable(
            _in_turn([[[question] for question in questions] for questions in self._by_category()])
        )
        return Workload(self.name, tuple(chosen)[:count])

    def groups(self, size: int) -> list[tuple[Question, ...]]:
        """Groups of `size` questions that run together; the last may be smaller. Groups of a single category come first, with
        the categories in turn; then groups of the questions left over."""
        by_category = self._by_category()
        full = [[kind[i : i + size] for i in range(0, len(kind) - size + 1, size)] for kind in by_category]
        left = [[[question] for question in kind[len(kind) - len(kind) % size :]] for kind in by_category]
        mixed = list(chain.from_iterable(_in_turn(left)))
        return [*map(tuple, _in_turn(full)), *(tuple(mixed[i : i + size]) for i in range(0, len(mixed), size))]

    def _by_category(self) -> list[list[Question]]:
        return [[one for one in self.questions if one.category == category] for category in self.categories]


def category_of(questions: Sequence[Question]) -> str:
    """Their common category, or "mixed"."""
    categories = {question.category for question in questions}
    return categories.pop() if len(categories) == 1 else _MIXED


def _in_turn(parts: Sequence[Sequence[list[Question]]]) -> Iterator[list[Question]]:
    for row in zip_longest(*parts):
        yield from (part for part in row if part is not None)


def _question(line: str, number: int, where: str) -> Question:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ForedraftError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(fields, dict) or not ("turns" in fields or "prompt" in fields):
        raise ForedraftError(f'{where}: must be an object with either "turns" or "prompt"')
    if "turns" in fields and "prompt" in fields:
        raise ForedraftError(f'{where}: has "turns" and "prompt": give either, not both')
    turns = fields["turns"] if "turns" in fields else [fields["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ForedraftError(f'{where}: "turns" must be a list of strings and "prompt" a string, none of them empty')
    return Question(
        question_id=_label(fields, "question_id", str(number), where),
        category=_label(fields, "category", _UNNAMED, where),
        turns=tuple(turns),
        is_chat="turns" in fields,
    )


def _label(fields: Mapping[str, Any], name: str, default: str, where: str) -> str:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ForedraftError(f"{where}: {name} must be a non-empty string or an integer, not {value!r}")
    return str(value)
