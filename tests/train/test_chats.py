"""Conversations that a target writes with its template, from its own or given questions; each is written once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams
from foredraft.text.chat_template import render_chat, user_turn_frame
from foredraft.train.chats import ChatSpec, question_counter, write_chats
from foredraft.train.generations import complete, writing_llm

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPEC = ChatSpec(5, (0.8, 0.0), question_tokens=6, answer_tokens=8, seed=3)


@pytest.fixture(scope="module")
def chat_toy(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "toy"
    shutil.copytree(toy, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def ignore(share: float) -> None: ...


def test_the_target_asks_and_answers(chat_toy: Path, tmp_path: Path) -> None:
    chats = write_chats(str(chat_toy), [], SPEC, tmp_path, ignore)
    opening, closing = user_turn_frame(AutoTokenizer.from_pretrained(chat_toy))
    assert len(chats) == SPEC.number
    assert len({tuple(chat) for chat in chats}) == SPEC.number
    for chat in chats:
        assert chat[: len(opening)] == opening
        (end,) = (i for i in range(len(opening), len(opening) + 7) if chat[i : i + len(closing)] == closing)
        assert end - len(opening) <= SPEC.question_tokens
        assert 1 <= len(chat) - end - len(closing) <= SPEC.answer_tokens


def test_given_questions_are_answered_in_turn(chat_toy: Path, tmp_path: Path) -> None:
    questions = ["Why is the sky blue?", "Who was the cat?"]
    chats = write_chats(str(chat_toy), questions, SPEC, tmp_path, ignore)
    tokenizer = AutoTokenizer.from_pretrained(chat_toy)
    for number, chat in enumerate(chats):
        prompt = render_chat(tokenizer, [{"role": "user", "content": questions[number % 2]}])
        assert chat[: len(prompt)] == prompt
        assert 1 <= len(chat) - len(prompt) <= SPEC.answer_tokens
    assert chats[1] == chats[3]  # both are greedy answers to the same question
    assert chats[0] != chats[2]


def test_questions_count_as_given_and_answers_do_not(chat_toy: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_toy)
    count, (opening, closing) = question_counter(tokenizer), user_turn_frame(tokenizer)
    question, answer = [300, 301], [302, 303, *closing, 304]
    assert count([*opening, *question, *closing, *answer]) == len(opening) + 2 + len(closing)
    assert count([*opening, *question, *closing]) == len(opening) + 2 + len(closing)
    assert count([*opening, *question]) == count([]) == 0, "no conversation"
    for chat in write_chats(str(chat_toy), [], SPEC, tmp_path, ignore):
        assert 1 <= len(chat) - count(chat) <= SPEC.answer_tokens


def test_written_conversations_are_not_written_again(chat_toy: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    whole = write_chats(str(chat_toy), [], SPEC, tmp_path, shares.append)
    file = tmp_path / "chats.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:4])
    assert write_chats(str(chat_toy), [], SPEC, tmp_path, shares.append) == whole
    assert [json.loads(line) for line in file.read_text().splitlines()] == whole
    assert write_chats("gone", [], SPEC, tmp_path, shares.append) == whole
    assert shares == [1.0, 1.0]


def test_a_model_without_a_template_is_refused(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="no chat template"):
        write_chats(str(toy), [], SPEC, tmp_path, ignore)


def test_the_engine_that_writes_texts_retains_none(toy: Path) -> None:
    llm = writing_llm(str(toy))
    complete(llm, [[1, 2, 3]] * 3, [SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)] * 3)
    assert llm.engine.pool.used == 0
