"""Questions that a chat model asks itself: complete, distinct, reproducible."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft.text.chat_template import user_turn_frame
from foredraft.train.chats import QuestionWriter
from foredraft.train.generations import writing_llm
from recipes.own_questions import MIN_CHARACTERS, own_questions


@pytest.mark.real_model
def test_questions_are_complete_distinct_and_reproducible(smollm2: Path) -> None:
    llm = writing_llm(str(smollm2))
    assert llm.tokenizer is not None
    questions = list(own_questions(llm, 12, seed=3))
    assert 0 < len(questions) <= 12
    assert len(set(questions)) == len(questions)
    assert all(len(text) >= MIN_CHARACTERS for text in questions)
    few = list(own_questions(llm, 6, seed=3))
    assert few == questions[: len(few)]
    assert few != list(own_questions(llm, 6, seed=4))

    _, closing = user_turn_frame(llm.tokenizer)
    written = QuestionWriter(llm, max_tokens=24, seed=3).write(range(12))
    assert {len(ids) == 24 for ids, is_complete in written if not is_complete} == {True}
    assert any(is_complete for _, is_complete in written)
    assert all(closing[0] not in ids for ids, _ in written)
