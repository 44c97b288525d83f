"""Questions for a chat model: as many as are asked for, each once, the same ones every time, and none of a benchmark's."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest

from recipes.chat_questions import FORMS, SUBJECTS, question, questions, subjects_of

MT_BENCH = Path(__file__).parents[2].parent / "shared" / "data" / "prompts" / "mt_bench.jsonl"
FIRST = list(islice(questions(random.Random(0)), 5000))


def test_they_are_distinct_and_complete() -> None:
    assert len(set(FIRST)) == len(FIRST)
    assert not any("{" in text or "}" in text or "  " in text for text in FIRST)


def test_they_are_the_same_every_time() -> None:
    assert list(islice(questions(random.Random(0)), 200)) == FIRST[:200]
    assert list(islice(questions(random.Random(1)), 200)) != FIRST[:200]


def test_every_form_asks_once_a_round() -> None:
    forms = FORMS.strip().split("\n")
    assert len(set(forms)) == len(forms)
    patterns = [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(form))) for form in forms]
    assert all(any(pattern.fullmatch(text) for text in FIRST[: len(forms)]) for pattern in patterns)


def test_a_form_does_not_name_a_subject_twice() -> None:
    text = question("{city} and {other_city} and {third_city}", random.Random(3))
    assert len({*text.split(" and ")} & {*subjects_of("city")}) == 3


def test_subjects_are_listed_once() -> None:
    for kind in SUBJECTS:
        assert len(set(subjects_of(kind))) == len(subjects_of(kind))


def test_no_question_of_mt_bench_is_among_them() -> None:
    if not MT_BENCH.exists():
        pytest.skip("MT-bench's questions are not here")
    theirs = {turn.strip() for line in MT_BENCH.read_text().splitlines() for turn in json.loads(line)["turns"]}
    assert not theirs & set(FIRST)
