"""Inputs may be one prompt or many, with one set of parameters or one for each."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams
from foredraft.text.inputs import as_conversations, as_prompts, params_for_each, priority_for_each


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        ([1, 2], [[1, 2]]),
        ({"prompt": "text"}, [{"prompt": "text"}]),
        (["a", "b"], ["a", "b"]),
        ([[1], "b"], [[1], "b"]),
        (("a", [2]), ["a", [2]]),
        ([], []),
        (7, [7]),  # refused later, when prompts are checked
    ],
)
def test_one_prompt_becomes_a_list(prompts: Any, expected: list[Any]) -> None:
    assert as_prompts(prompts) == expected


def test_one_conversation_becomes_a_list() -> None:
    talk = [{"role": "user", "content": "hi"}]
    assert as_conversations(talk) == [talk]
    assert as_conversations([talk, talk]) == [talk, talk]


def test_parameters_are_for_all_or_one_for_each() -> None:
    params = SamplingParams(max_tokens=3)
    assert params_for_each(None, 2) == [None, None]
    assert params_for_each(params, 2) == [params, params]
    assert params_for_each((params, params), 2) == [params, params]
    for bad in ([params], {"max_tokens": 3}):
        with pytest.raises(ForedraftError, match="one SamplingParams, or one for each of the 2 prompts"):
            params_for_each(bad, 2)  # type: ignore[arg-type]


def test_priorities_are_none_or_one_for_each() -> None:
    assert priority_for_each(None, 2) == [0, 0]
    assert priority_for_each([3, -1], 2) == [3, -1]
    for bad in ([1], 1):
        with pytest.raises(ForedraftError, match="one for each of the 2 prompts"):
            priority_for_each(bad, 2)  # type: ignore[arg-type]
