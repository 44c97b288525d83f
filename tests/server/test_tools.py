"""Tool calls with the official client. The model's text is forced, by a structured output with one choice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from foredraft import LLM, ForedraftError
from foredraft.server import ServerSettings
from foredraft.server.tool_call_format import detect_tool_call_parser
from tests.server.conftest import SETTINGS, Running, running

MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Rome"]}, "unit": {"$ref": "#/$defs/Unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"Unit": {"enum": ["C", "F"]}},
        },
    },
}
PING: dict[str, Any] = {
    "type": "function",
    "function": {"name": "ping", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with running(llm, replace(SETTINGS, tool_call_parser="hermes")) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llama(llm: LLM) -> Iterator[openai.OpenAI]:
    with running(llm, replace(SETTINGS, tool_call_parser="llama3_json")) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def asked(**settings: Any) -> dict[str, Any]:
    return {
        "model": "pair",
        "messages": MESSAGES,
        "tools": [WEATHER, PING],
        "max_tokens": 150,
        "temperature": 0,
        **settings,
    }


def writing(text: str, **settings: Any) -> dict[str, Any]:
    """A request to which the model writes this text."""
    return asked(extra_body={"guided_choice": [text]}, **settings)


def streamed(client: openai.OpenAI, settings: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str | None]:
    """The content, calls and finish reason of a stream, joined as clients do; asserts that the deltas have OpenAI's form."""
    content, calls, ids, reason = "", [], set(), None
    for chunk in client.chat.completions.create(**settings, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.index == len(calls):
                assert delta.type == "function"
                assert delta.function.arguments == ""
                ids.add(delta.id)
                calls.append((delta.function.name or "", ""))
            else:
                assert delta.id is delta.type is delta.function.name is None
                name, arguments = calls[delta.index]
                calls[delta.index] = name, arguments + (delta.function.arguments or "")
    assert len(ids) == len(calls)
    return content, calls, reason


def whole(client: openai.OpenAI, settings: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]], str | None]:
    (choice,) = client.chat.completions.create(**settings).choices
    found: Any = choice.message.tool_calls or []
    return choice.message.content, [(one.function.name, one.function.arguments) for one in found], choice.finish_reason


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (HERMES, None, [("weather", '{"city": "Köln"}')]),
        (f"I look.\n{HERMES}\n{HERMES}", "I look.", [("weather", '{"city": "Köln"}')] * 2),
        (HERMES.replace("weather", "nobody"), HERMES.replace("weather", "nobody"), []),
        (HERMES[:-3], HERMES[:-3], []),
        ("No call.", "No call.", []),
    ],
)
def test_optional_calls_are_parsed(client: openai.OpenAI, text: str, content: str | None, calls: Any) -> None:
    reason = "tool_calls" if calls else "stop"
    assert whole(client, writing(text)) == (content, calls, reason)
    assert streamed(client, writing(text)) == (content or "", calls, reason)


def test_calls_in_llamas_form_are_parsed(llama: openai.OpenAI) -> None:
    expected = [("weather", '{"city": "Köln"}')]
    assert whole(llama, writing(LLAMA)) == (None, expected, "tool_calls")
    assert streamed(llama, writing(LLAMA)) == ("", expected, "tool_calls")
    assert whole(llama, writing(HERMES)) == (HERMES, [], "stop")


def test_calls_are_not_parsed_without_tools_or_a_parser(client: openai.OpenAI, server: Running) -> None:
    """Without tools, with tool_choice "none", and on a server whose template has no known form of calls."""
    assert whole(client, {**writing(HERMES), "tools": []}) == (HERMES, [], "stop")
    assert whole(client, writing(HERMES, tool_choice="none")) == (HERMES, [], "stop")
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert whole(other, writing(HERMES)) == (HERMES, [], "stop")


def test_without_parallel_calls_only_one_is_parsed(client: openai.OpenAI) -> None:
    content, calls, _ = whole(client, writing(f"{HERMES}\n{HERMES}", parallel_tool_calls=False))
    assert (content, len(calls)) == (HERMES, 1)


def test_a_call_cut_by_max_tokens_is_content(client: openai.OpenAI) -> None:
    content, calls, reason = whole(client, writing(HERMES, max_completion_tokens=6, max_tokens=6))
    assert content is not None
    assert HERMES.startswith(content)
    assert (calls, reason) == ([], "length")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_required_and_named_calls_are_written(client: openai.OpenAI, choice: Any) -> None:
    settings = asked(tool_choice=choice, parallel_tool_calls=False, temperature=1.0, seed=5)
    content, calls, reason = whole(client, settings)
    assert (content, reason) == (None, "tool_calls")
    ((name, arguments),) = calls
    found = json.loads(arguments)
    assert name in ("weather", "ping")
    assert found.keys() == ({"city", "unit"} if name == "weather" else set())
    assert streamed(client, settings) == ("", calls, reason)
    for gamma in (0, 4):  # drafts are constrained too, and change nothing
        assert whole(client, {**settings, "extra_body": {"speculative_tokens": gamma}}) == (content, calls, reason)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str)
@pytest.mark.parametrize(
    "parameters", [{}, {"properties": {"a": {"enum": [1]}}, "additionalProperties": False}], ids=str
)
def test_arguments_are_an_object_without_a_type(client: openai.OpenAI, choice: Any, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    settings = asked(
        tools=[tool], tool_choice=choice, parallel_tool_calls=False, temperature=1.0, seed=1, max_tokens=50
    )
    _, ((_, arguments),), _ = whole(client, settings)
    assert arguments.lstrip().startswith("{")


def test_parameters_of_another_type_are_refused(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    with pytest.raises(openai.BadRequestError, match="must have the type") as caught:
        whole(client, asked(tools=[tool], tool_choice="required"))
    assert caught.value.param == "tools"


@pytest.mark.parametrize("max_tokens", range(20, 60, 4))
def test_required_calls_cut_by_max_tokens_leave_no_content(client: openai.OpenAI, max_tokens: int) -> None:
    settings = asked(tool_choice="required", temperature=1.0, seed=5, max_tokens=max_tokens)
    content, calls, _ = whole(client, settings)
    assert (content is None) == bool(calls)
    assert streamed(client, settings)[:2] == (content or "", calls)


def test_several_texts_have_their_own_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **asked(tool_choice="required", n=3, temperature=1.0, seed=1, max_tokens=400)
    )
    for choice in answer.choices:
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            assert call.function.name in ("weather", "ping")


def test_a_named_call_cut_by_max_tokens_has_partial_arguments(client: openai.OpenAI) -> None:
    settings = asked(tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=3)
    content, ((name, arguments),), reason = whole(client, settings)
    assert (content, name, reason) == (None, "weather", "length")
    assert 0 < len(arguments) < 40
    assert streamed(client, settings) == ("", [(name, arguments)], reason)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_cut_by_a_stop_string_is_not_reported_as_whole(client: openai.OpenAI, choice: Any) -> None:
    settings = asked(tool_choice=choice, tools=[WEATHER], stop=["unit"])
    content, ((name, arguments),), reason = whole(client, settings)
    assert (content, name, reason) == (None, "weather", "stop")
    assert arguments.endswith('"')
    assert streamed(client, settings) == ("", [(name, arguments)], reason)


def test_a_stop_string_after_a_whole_call_ends_a_text_with_calls(client: openai.OpenAI) -> None:
    settings = writing(f"{HERMES}\nDone. More.", stop=["Done"])
    expected = [("weather", '{"city": "Köln"}')]
    assert whole(client, settings) == (None, expected, "tool_calls")
    assert streamed(client, settings) == ("", expected, "tool_calls")


def test_a_conversation_with_calls_works(client: openai.OpenAI) -> None:
    """The client's own dumps are sent back, with the tool's result."""
    messages = list(MESSAGES)
    for _ in range(3):
        message = (
            client.chat.completions.create(**{**writing(f"Well.\n{HERMES}"), "messages": messages}).choices[0].message
        )
        assert message.tool_calls
        messages += [
            message.model_dump(),
            *({"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 3}'} for call in message.tool_calls),
        ]
    assert len(messages) == 7


class City(BaseModel):
    city: str


def test_the_clients_helpers_work(client: openai.OpenAI) -> None:
    """Its tools from pydantic models are strict, which optional calls cannot guarantee: the headers say so, and calls are parsed."""
    tool: Any = openai.pydantic_function_tool(City, name="weather")
    settings = {**writing(HERMES), "tools": [tool]}
    raw = client.chat.completions.with_raw_response.create(**settings)
    assert raw.headers["X-Foredraft-Ignored"] == "tools[0].function.strict"
    (call,) = client.chat.completions.parse(**settings).choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == City(city="Köln")
    with client.chat.completions.stream(**settings) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == City(city="Köln")


@pytest.mark.parametrize(
    ("given", "template", "expected"),
    [
        ("auto", '<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        ("auto", "plain", None),
        ("none", '<tool_call>{"name": ..., "arguments": ...}</tool_call>', None),
        ("llama3_json", "plain", "llama3_json"),
    ],
)
def test_the_form_of_calls_is_detected_or_given(llm: LLM, given: str, template: str, expected: str | None) -> None:
    assert detect_tool_call_parser(ServerSettings(chat_template=template, tool_call_parser=given), llm) == expected


def test_an_unknown_form_of_calls_is_refused() -> None:
    with pytest.raises(ForedraftError, match="hermes"):
        ServerSettings(tool_call_parser="xml")
