"""Structured output over the wire, with the official client and with vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import Running

MESSAGES: list[Any] = [{"role": "user", "content": "Tell of an animal."}]


class Animal(BaseModel):
    name: Literal["cat", "dog", "rabbit"]
    num_legs: Literal[2, 4]
    is_big: bool


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_client_parses_a_structured_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="pair", messages=MESSAGES, response_format=Animal, max_completion_tokens=100, temperature=1.0, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_gives_the_same_object(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 100}
    whole = client.chat.completions.parse(**settings, response_format=Animal)
    with client.chat.completions.stream(**settings, response_format=Animal) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize("gamma", [1, 4, "auto"])
def test_drafts_do_not_change_structured_text(client: openai.OpenAI, gamma: Any) -> None:
    def text(**extra: Any) -> str:
        answer = client.completions.create(
            model="pair",
            prompt="An animal:",
            max_tokens=100,
            temperature=0,
            extra_body={"guided_json": Animal.model_json_schema(), **extra},
        )
        return answer.choices[0].text

    assert text(speculative_tokens=gamma) == text(speculative_tokens=0)
    Animal.model_validate_json(text(speculative_tokens=gamma))


@pytest.mark.parametrize(
    ("field", "asked", "pattern"),
    [
        ("guided_regex", "[a-c]{3}", "[a-c]{3}"),
        ("guided_choice", ["yes", "no"], "yes|no"),
        ("guided_grammar", 'start: ("x" | "z") "y"', "[xz]y"),
        ("structured_outputs", {"choice": ["up", "down"]}, "up|down"),
        ("structured_outputs", {"regex": "[0-9]{2}"}, "[0-9]{2}"),
    ],
)
def test_vllms_fields_are_honoured(client: openai.OpenAI, field: str, asked: Any, pattern: str) -> None:
    answer = client.completions.create(
        model="pair", prompt="Once upon", max_tokens=40, temperature=1.0, extra_body={field: asked}
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_json_object_gives_any_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pair", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=400, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("guided_json", {"type": "string", "minLength": 5, "maxLength": 2}),
        ("guided_json", {"type": "nonsense"}),
        ("guided_json", "no json"),
        ("guided_regex", "("),
        *[("guided_regex", f"(((((a{{1,99{i}}}){{1,999}}){{1,999}}){{1,999}}){{1,999}})") for i in range(6)],
        ("guided_grammar", "start: nowhere"),
        ("structured_outputs", {"regex": "("}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_impossible_format_is_refused_by_field(server: Running, field: str, asked: Any) -> None:
    answer = server.post(
        "/v1/completions", {"prompt": "Once", "temperature": 0, field: asked}
    )  # a sampled text may end before it is refused
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200
