"""What a workload file may contain, what is refused, and which questions run together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import ForedraftError
from foredraft.bench import Question, Workload, built_in_workload
from foredraft.bench.workload import category_of

MT_BENCH = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "mt_bench.jsonl"

Texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)
Categories = st.sampled_from(["math", "roleplay", "Übersetzung"])


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    questions = []
    for number in range(draw(st.integers(1, 8))):
        is_chat = draw(st.booleans())
        turns = draw(st.lists(Texts, min_size=1, max_size=3 if is_chat else 1))
        questions.append(Question(f"q{number}", draw(Categories), tuple(turns), is_chat))
    return Workload("file.jsonl", tuple(questions))


def line(question: Question) -> str:
    said = {"turns": list(question.turns)} if question.is_chat else {"prompt": question.turns[0]}
    return json.dumps({"question_id": question.question_id, "category": question.category, **said})


@given(workloads())
def test_a_written_workload_is_read(workload: Workload) -> None:
    assert Workload.parse("\n".join(map(line, workload.questions)) + "\n", "file.jsonl") == workload


@given(workloads(), st.integers(1, 5))
def test_groups_have_every_question_once_and_only_the_last_is_not_full(workload: Workload, size: int) -> None:
    groups = workload.groups(size)
    ids = [question.question_id for group in groups for question in group]
    assert sorted(ids) == sorted(question.question_id for question in workload.questions)
    assert all(len(group) == size for group in groups[:-1])
    assert 1 <= len(groups[-1]) <= size


@given(workloads(), st.integers(1, 5))
def test_groups_have_one_category_as_far_as_possible(workload: Workload, size: int) -> None:
    groups = workload.groups(size)
    for category in workload.categories:
        num_questions = sum(question.category == category for question in workload.questions)
        of_one = [group for group in groups if category_of(group) == category]
        assert len(of_one) >= num_questions // size
    if len(workload.questions) <= size:
        assert len(groups) == 1


def test_the_categories_of_groups_alternate() -> None:
    questions = [Question(str(i), category, ("a",)) for i, category in enumerate(["x", "x", "x", "y", "z", "z"])]
    workload = Workload("w", tuple(questions))
    assert [category_of(group) for group in workload.groups(1)] == ["x", "y", "z", "x", "z", "x"]
    assert [category_of(group) for group in workload.groups(2)] == ["x", "z", "mixed"]


@given(workloads(), st.integers(1, 10))
def test_the_first_questions_are_of_as_many_categories_as_possible(workload: Workload, count: int) -> None:
    few = workload.first(count)
    assert len(few.questions) == min(count, len(workload.questions))
    assert set(few.questions) <= set(workload.questions)
    assert len(few.categories) == min(count, len(workload.categories))


def test_ids_and_categories_are_optional() -> None:
    workload = Workload.parse('{"prompt": "a"}\n\n{"turns": ["b", "c"], "reference": ["x"]}\n', "w")
    assert workload.questions == (Question("1", "prompts", ("a",)), Question("3", "prompts", ("b", "c"), is_chat=True))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "contains no questions"),
        ("nonsense", "w, line 1: not valid JSON"),
        ('["a"]', "line 1: must be an object"),
        ('{"text": "a"}', 'must be an object with either "turns" or "prompt"$'),
        ('{"prompt": "a", "turns": ["a"]}', r'has "turns" and "prompt": give either, not both'),
        ('{"turns": []}', '"turns" must be a list of strings'),
        ('{"turns": "a"}', '"turns" must be a list of strings'),
        ('{"turns": ["a", ""]}', "none of them empty"),
        ('{"prompt": 3}', '"prompt" a string'),
        ('{"prompt": "a", "category": 1.5}', "category must be a non-empty string"),
        ('{"prompt": "a", "question_id": null}', "question_id must be a non-empty string"),
        ('{"prompt": "a", "question_id": 1}\n{"prompt": "b", "question_id": "1"}', "question_id 1 occurs twice"),
    ],
)
def test_invalid_workloads_are_refused(text: str, words: str) -> None:
    with pytest.raises(ForedraftError, match=words):
        Workload.parse(text, "w")


def test_choosing_no_questions_is_refused() -> None:
    with pytest.raises(ForedraftError, match="at least 1"):
        built_in_workload().first(0)


def test_the_built_in_prompts_are_of_several_kinds_and_end_where_a_token_ends() -> None:
    workload = built_in_workload()
    assert len(workload.categories) >= 4
    assert not any(turn.endswith(("\n", " ")) for question in workload.questions for turn in question.turns)


@pytest.mark.skipif(not MT_BENCH.exists(), reason="the shared prompts are not here")
def test_mt_bench_is_read() -> None:
    workload = Workload.parse(MT_BENCH.read_text(), MT_BENCH.name)
    assert len(workload.questions) == 80
    assert len(workload.categories) == 8
    assert all(len(question.turns) == 2 for question in workload.questions)


def test_encoder_decoders_have_their_own_sources() -> None:
    workload = built_in_workload(of_sources=True)
    assert workload.categories == ["translation", "summarisation"]
    assert not {q.question_id for q in workload.questions} & {q.question_id for q in built_in_workload().questions}
