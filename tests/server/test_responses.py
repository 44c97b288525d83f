"""The Responses API, used through the official client."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import response_create_params
from pydantic import BaseModel

from foredraft import LLM, SamplingParams
from foredraft.server import RequestLimits
from foredraft.server.wire.responses_request import ResponsesRequest
from tests.server.conftest import SETTINGS, TEMPLATE, Running, running
from tests.server.wire.test_requests import accepted

QUESTION = "Tell a story."
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def hermes(llm: LLM) -> Iterator[Running]:
    with running(llm, replace(SETTINGS, tool_call_parser="hermes")) as found:
        yield found


@pytest.fixture(scope="module")
def client(hermes: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0)


def asked(**settings: Any) -> dict[str, Any]:
    return {"model": "pair", "input": QUESTION, "max_output_tokens": 12, "temperature": 0, **settings}


def body(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": QUESTION, **fields})


def test_a_response_has_the_text_of_the_chat(client: openai.OpenAI, llm: LLM) -> None:
    found = client.responses.create(**asked(instructions="Be kind.", metadata={"a": "b"}))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
    ids = llm.chat_prompt(messages, chat_template=TEMPLATE)
    (expected,) = LLM(method="none").generate([ids], SamplingParams(temperature=0, max_tokens=12))
    assert found.output_text == expected.outputs[0].text
    assert found.id.startswith("resp_")
    assert (found.status, found.object, found.store) == ("incomplete", "response", False)  # type: ignore[attr-defined]
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert (found.instructions, found.metadata, found.max_output_tokens) == ("Be kind.", {"a": "b"}, 12)
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(ids), 12)
    assert found.usage.total_tokens == len(ids) + 12


def test_a_response_to_a_finished_text_is_completed(client: openai.OpenAI) -> None:
    found = client.responses.create(**asked(extra_body={"guided_choice": ["Well."]}))
    assert (found.status, found.output_text, found.incomplete_details) == ("completed", "Well.", None)
    assert found.output[0].status == "completed"  # type: ignore[union-attr]


def test_a_call_cut_by_a_stop_string_is_incomplete(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "weather"}
    settings = asked(tools=[TOOL], tool_choice=choice, max_output_tokens=100, extra_body={"stop": ["city"]})
    found = client.responses.create(**settings)
    assert (found.status, found.incomplete_details, found.completed_at) == ("incomplete", None, None)  # type: ignore[attr-defined]
    (call,) = found.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    events: list[Any] = list(client.responses.create(**settings, stream=True))
    assert events[-1].type == "response.incomplete"
    assert [event.item.status for event in events if event.type == "response.output_item.done"] == ["incomplete"]


def without_ids(response: Any) -> Any:
    """A response without what differs between two answers to the same request."""
    found = response.model_dump()
    for name in ("id", "created_at", "completed_at"):
        del found[name]
    found["usage"]["input_tokens_details"] = None  # the second one finds its prompt in the cache
    for item in found["output"]:
        item.pop("id"), item.pop("call_id", None)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"extra_body": {"guided_choice": ["Well. ü🌧"]}},
        {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100, "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 9},
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}, "extra_body": {"stop": ["city"]}},
        {
            "tools": [TOOL],
            "max_output_tokens": 200,
            "extra_body": {"guided_choice": [f"I look.\n{HERMES}\n{HERMES} Done."]},
        },
    ],
    ids=lambda one: str(one)[:60],
)
def test_events_join_to_the_whole_response(client: openai.OpenAI, settings: dict[str, Any]) -> None:
    whole = client.responses.create(**asked(**settings))
    events: list[Any] = list(client.responses.create(**asked(**settings), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[-1].type == f"response.{whole.status}"
    assert without_ids(events[-1].response) == without_ids(whole)
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    check_items(events[2:-1], events[-1].response.output)


def check_items(events: list[Any], output: list[Any]) -> None:
    """Assert that each item is added, grows, and is done, one after the other."""
    for index, item in enumerate(output):
        own = [event for event in events if event.output_index == index]
        assert own == events[: len(own)]
        events = events[len(own) :]
        added, *grown, done = own
        assert (added.type, added.item.id, added.item.status) == ("response.output_item.added", item.id, "in_progress")
        assert done.type == "response.output_item.done"
        assert done.item == item
        assert all(event.item_id == item.id for event in grown)
        kinds = [event.type for event in grown]
        deltas = "".join(event.delta for event in grown if event.type.endswith(".delta"))
        if item.type == "message":
            assert (added.item.content, deltas) == ([], item.content[0].text)
            assert (kinds[0], *kinds[-2:]) == (
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
            )
            assert grown[-2].text == grown[-1].part.text == deltas
        else:
            assert (added.item.arguments, deltas) == ("", item.arguments)
            assert kinds[-1] == "response.function_call_arguments.done"
            assert (grown[-1].arguments, grown[-1].name) == (deltas, item.name)
    assert events == []


def test_the_clients_stream_helper_works(client: openai.OpenAI) -> None:
    with client.responses.stream(**asked(extra_body={"guided_choice": ["Well."]})) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "Well."


class Animal(BaseModel):
    name: Literal["cat", "dog"]
    num_legs: Literal[2, 4]


def test_a_response_may_follow_a_schema(client: openai.OpenAI) -> None:
    found = client.responses.parse(**asked(max_output_tokens=100, temperature=1.0), text_format=Animal)
    assert isinstance(found.output_parsed, Animal)
    assert found.text is not None
    assert found.text.format is not None
    assert found.text.format.type == "json_schema"
    some = client.responses.create(**asked(max_output_tokens=400, text={"format": {"type": "json_object"}}))
    assert some.output_text.lstrip().startswith("{")


def test_a_conversation_with_a_tool_works(client: openai.OpenAI) -> None:
    """Items of the response are sent back unchanged, with the tool's result."""
    items: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    settings = asked(tools=[TOOL], max_output_tokens=100, extra_body={"guided_choice": [f"I look.\n{HERMES}"]})
    for _ in range(2):
        raw = client.responses.with_raw_response.create(**{**settings, "input": items})
        assert "X-Foredraft-Ignored" not in raw.headers
        found = raw.parse()
        message, call = found.output
        assert (message.type, call.type, found.output_text) == ("message", "function_call", "I look.")
        assert json.loads(call.arguments) == {"city": "Oslo"}  # type: ignore[union-attr]
        items += [one.model_dump() for one in found.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"})  # type: ignore[union-attr]


def test_items_become_template_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'}
    found = body(
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            call,
            {**call, "call_id": "2"},
            {"type": "function_call_output", "call_id": "1", "output": "3"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
        tools=[TOOL],
    )  # fmt: skip
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}} for one in ("1", "2")]
    assert found.template_messages() == [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "No."},
    ]
    shown = {name: value for name, value in TOOL.items() if name not in ("type", "strict")}
    assert found.template_args() == {"tools": [{"type": "function", "function": shown}]}
    assert list(found.unknown_fields()) == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"store": True}, "store", "nothing is stored"),
        ({"background": True}, "background", "nothing is stored"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "nothing is stored"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "function_call"),
        ({"input": []}, None, "input has no message"),
        ({"input": [{"type": "reasoning", "summary": []}]}, None, "input has no message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "input_text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"truncation": "auto"}, "truncation", "not truncated"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "template"),
        ({"n": 2}, "n", "one text"),
        ({"messages": []}, "messages", "another route"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "max_tokens"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, None, "text.format"),
        ({"input": "word " * 100_000}, "input", "too long"),
        ({"input": "word " * 5_000}, "input", "5008 tokens"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_refusals_name_the_field(hermes: Running, fields: dict[str, Any], param: str | None, words: str) -> None:
    answer = hermes.post("/v1/responses", {"input": QUESTION, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param or (param is not None and (error["param"] or "").startswith(param))
    assert words in error["message"]


def test_an_unknown_field_is_reported(hermes: Running) -> None:
    found = hermes.post("/v1/responses", {**asked(), "typo": 1, "tools": [{**TOOL, "strict": True}]})
    assert found.headers["X-Foredraft-Ignored"] == "typo, tools[0].strict"


def test_options_for_usage_are_reported(hermes: Running) -> None:
    """The last event always has the usage, and no other event has it."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    found = hermes.post("/v1/responses", {**asked(), "stream": True, "stream_options": options})
    expected = "stream_options.include_usage, stream_options.continuous_usage_stats"
    assert found.headers["X-Foredraft-Ignored"] == expected
    assert found.text.count('"usage":{') == 1
    unset = {"include_usage": None, "continuous_usage_stats": False}
    found = hermes.post("/v1/responses", {**asked(), "stream": True, "stream_options": unset})
    assert "X-Foredraft-Ignored" not in found.headers


def test_every_field_that_openai_documents_is_known() -> None:
    known = {one.alias or name for name, one in ResponsesRequest.model_fields.items()}
    documented = typing.get_type_hints(response_create_params.ResponseCreateParamsBase)
    assert set(documented) - {"stream"} <= known


def test_a_failed_stream_reports_its_error(llm: LLM) -> None:
    with running(llm, replace(SETTINGS, limits=RequestLimits(request_seconds=0.2))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        settings = asked(max_output_tokens=900, extra_body={"ignore_eos": True, "speculative_tokens": 0})
        events: list[Any] = list(client.responses.create(**settings, stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == events[-1].response.error.code == "timeout"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.status == "failed"
    assert events[-2].param is None
    assert "param" in events[-2].model_fields_set
    check_items(events[2:-2], events[-1].response.output)
    assert [item.status for item in events[-1].response.output] == ["incomplete"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["message", "function_call", "user", "json_schema"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["type", "role", "content", "name", "format", "arguments", "call_id"]), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(st.sampled_from(sorted(ResponsesRequest.model_fields)), JSON)
def test_accepted_values_are_kept(name: str, value: Any) -> None:
    request = accepted(ResponsesRequest, {"input": QUESTION, name: value}, name)
    if request is not None:
        messages = request.template_messages()
        if name == "input" and isinstance(value, str):
            assert messages == [{"role": "user", "content": value}]
        elif name == "instructions" and value is not None:
            assert messages[0] == {"role": "system", "content": value}
        elif name != "input":
            assert messages == [{"role": "user", "content": QUESTION}]
        assert set(request.unknown_fields()) <= set(member_names(value, name))


def member_names(value: Any, place: str) -> Iterator[str]:
    """The path of every member of a value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        inner = f"{place}[{key}]" if isinstance(value, list) else f"{place}.{key}"
        yield inner
        yield from member_names(member, inner)
