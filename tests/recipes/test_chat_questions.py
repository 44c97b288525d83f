"""Questions for a chat model: the requested number, distinct, reproducible, and none from a benchmark."""

from __future__ import annotations

import ast
import json
import random
import re
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from foredraft.model import EMBEDDED
from recipes.chat_questions import (
    FORMS,
    WIDE_FORMS,
    Subjects,
    constrained,
    listed_forms,
    listed_subjects,
    question,
    questions,
    wide_subjects,
)

MT_BENCH = Path(__file__).parents[2].parent / "shared" / "data" / "prompts" / "mt_bench.jsonl"
TARGET = str(EMBEDDED / "target")
CHOICES = ("narrow", "wide")


@cache
def forms_and_subjects(choice: str) -> tuple[list[str], Subjects]:
    if choice == "narrow":
        return listed_forms(FORMS), listed_subjects()
    return [*listed_forms(FORMS), *listed_forms(WIDE_FORMS)], wide_subjects(TARGET)


def drawn(choice: str, number: int, seed: int = 0) -> list[str]:
    return list(islice(questions(*forms_and_subjects(choice), random.Random(seed)), number))


@pytest.mark.parametrize("choice", CHOICES)
def test_questions_are_distinct_and_complete(choice: str) -> None:
    first = drawn(choice, 5000)
    assert len(set(first)) == len(first)
    if choice == "narrow":  # code from the standard library may contain braces and double spaces
        assert not any("{" in text or "}" in text or "  " in text for text in first)
    assert not any(re.search(r"\{(\w+_)?(word|person|number|passage)\}", text) for text in first)


@pytest.mark.parametrize("choice", CHOICES)
def test_questions_are_reproducible(choice: str) -> None:
    assert drawn(choice, 200) == drawn(choice, 200)
    assert drawn(choice, 200) != drawn(choice, 200, seed=1)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_form_is_used_once_a_round(choice: str) -> None:
    forms, _ = forms_and_subjects(choice)
    assert len(set(forms)) == len(forms)
    patterns = [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(form)), re.DOTALL) for form in forms]
    first = drawn(choice, len(forms))
    assert all(any(pattern.fullmatch(text) for text in first) for pattern in patterns)


def test_a_form_does_not_name_a_subject_twice() -> None:
    subjects = {"city": ["Lima", "Oslo", "Rome"]}
    text = question("{city} and {other_city} and {third_city}", subjects, random.Random(3))
    assert sorted(text.split(" and ")) == subjects["city"]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_subject_is_listed_once_and_used(choice: str) -> None:
    forms, subjects = forms_and_subjects(choice)
    for kind, listed in subjects.items():
        assert len(set(listed)) == len(listed) > 3
        assert choice == "narrow" or any(f"{{{kind}}}" in form for form in forms), kind


def test_words_passages_and_code_are_found() -> None:
    _, subjects = forms_and_subjects("wide")
    assert all(word.isalpha() and word.islower() for word in subjects["word"])
    assert all("\n" not in text for text in subjects["passage"])
    assert all(ast.parse(text) for text in subjects["code"])


def test_no_question_is_from_mt_bench() -> None:
    if not MT_BENCH.exists():
        pytest.skip("MT-bench's questions are not here")
    theirs = {turn.strip() for line in MT_BENCH.read_text().splitlines() for turn in json.loads(line)["turns"]}
    assert not theirs & {text for choice in CHOICES for text in drawn(choice, 5000)}


def test_constraints_come_after_questions_and_never_into_code() -> None:
    texts = drawn("wide", 2000)
    given = list(constrained(texts, random.Random(3)))
    assert all(new.startswith(old) for new, old in zip(given, texts, strict=True))
    assert all(new == old for new, old in zip(given, texts, strict=True) if "\n" in old)
    assert 0.4 < sum(new != old for new, old in zip(given, texts, strict=True)) / len(texts) < 0.6
    assert not any("{words}" in text or "{count}" in text for text in given)
