"""Request bodies become parameters, without a socket."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from foredraft import ForedraftError, SamplingParams, StructuredOutputs
from foredraft.server.wire.chat_request import ChatRequest
from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.models import RequestModel
from foredraft.server.wire.sampling_fields import SamplingFields
from foredraft.server.wire.tokenization import TokenizeRequest

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hello", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": CHAT, **fields})


@pytest.mark.parametrize(
    ("request_type", "documented"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_that_openai_documents_is_known(request_type: Any, documented: Any) -> None:
    known = {one.alias or name for name, one in request_type.model_fields.items()}
    assert set(typing.get_type_hints(documented)) - {"stream"} <= known


def test_an_empty_body_means_the_defaults() -> None:
    assert completion().params() == SamplingParams(max_tokens=16)
    assert chat().params() == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatRequest])
def test_null_means_the_default(request_type: Any) -> None:
    given_fields = {"prompt": "hello"} if request_type is CompletionRequest else {"messages": CHAT}
    nulls = {one.alias or name: None for name, one in request_type.model_fields.items() if not one.is_required()}
    assert (
        request_type.model_validate(given_fields | nulls).params() == request_type.model_validate(given_fields).params()
    )


def kinds_of(base: type[RequestModel] = RequestModel) -> set[type[RequestModel]]:
    return {kind for one in base.__subclasses__() for kind in (one, *kinds_of(one))}


@pytest.mark.parametrize("kind", sorted(kinds_of(), key=lambda one: one.__name__), ids=lambda one: one.__name__)
def test_null_means_the_default_of_every_optional_field(kind: type[RequestModel]) -> None:
    for name, one in kind.model_fields.items():
        if not one.is_required():
            assert (one.alias or name) not in (refused_places(kind, {one.alias or name: None}) or ())
            schema = kind.model_json_schema()["properties"][one.alias or name]
            assert allows_null(schema), (kind, name)


def refused_places(kind: type[RequestModel], body: Any) -> set[Any] | None:
    """The fields that a refusal is about, an empty set if it is about the whole body, None if the body is accepted."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return {one["loc"][0] for one in error.errors() if one["loc"]}
    return None


def allows_null(schema: dict[str, Any]) -> bool:
    """Whether a schema allows null; an empty one allows everything."""
    options = schema.get("anyOf", [schema])
    return not ({"type", "anyOf", "enum", "$ref"} & schema.keys()) or any(
        one.get("type") == "null" or None in one.get("enum", ()) for one in options
    )


def test_unknown_fields_are_named() -> None:
    body = chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "a", "x": 1, "y": None}], "z": 1}],
        tools=[{"type": "function", "function": {"name": "f", "strict": True, "w": 1}}],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"any": 1}, "schema_": 1}},
        typo=1,
        mirostat=0,
    )
    assert sorted(body.unknown_fields()) == [
        "messages[0].content[0].x",
        "messages[0].z",
        "response_format.json_schema.schema_",
        "tools[0].function.strict",
        "tools[0].function.w",
        "typo",
    ]


def test_strict_tools_are_honoured_where_a_call_is_required() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for choice in ("required", "none", {"type": "function", "function": {"name": "f"}}):
        assert list(chat(tools=tools, tool_choice=choice).unknown_fields()) == []


SAMPLING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": -0.2,
    "seed": 5,
    "min_tokens": 1,
    "max_tokens": 9,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "bad_words": ["x"],
    "prompt_logprobs": 2,
    "speculative_tokens": 3,
    "verification": "coupled",
    "ignore_eos": True,
}


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("make", [completion, chat])
def test_a_sampling_field_reaches_the_parameters(make: Any, name: str) -> None:
    fields = {name: SAMPLING[name]} | ({"seed": 1} if name == "verification" else {})
    assert getattr(make(**fields).params(), name) == SAMPLING[name]


def test_fields_with_another_form_are_converted() -> None:
    assert completion(logit_bias={"5": 1, "7": -100}).params().logit_bias == {5: 1.0, 7: -100.0}
    assert completion(logprobs=3).params().logprobs == 3
    assert chat(logprobs=True, top_logprobs=3).params().logprobs == 3
    assert chat(logprobs=True).params().logprobs == 0
    assert chat(logprobs=False).params().logprobs is None
    assert chat(max_completion_tokens=5).params().max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).params().max_tokens == 5
    assert completion(echo=True, logprobs=2).params().prompt_logprobs == 2
    assert completion(stop="a").params().stop == ("a",)


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            StructuredOutputs(json=SCHEMA),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            StructuredOutputs(json_object=True),
        ),
        ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
        ({"guided_json": "{}"}, StructuredOutputs(json="{}")),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
        ({"guided_json_object": True}, StructuredOutputs(json_object=True)),
        ({"guided_json_object": False}, None),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, StructuredOutputs(regex="a")),
    ],
    ids=lambda value: str(value)[:50],
)
def test_structured_output_fields_are_converted(
    make: Any, fields: dict[str, Any], expected: StructuredOutputs | None
) -> None:
    assert make(**fields).params().structured_outputs == expected


def test_errors_name_the_field_that_was_sent() -> None:
    for body, error, field in (
        (completion(), "max_tokens must be", "max_tokens"),
        (chat(max_completion_tokens=1), "max_tokens must be", "max_completion_tokens"),
        (completion(guided_regex="a"), "structured_outputs.regex is endless", "guided_regex"),
        (completion(), "the prompt contains", "prompt"),
        (chat(), "the prompt contains", "messages"),
        (completion(), "something else", None),
    ):
        assert body.error_field(ForedraftError(error)) == field


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_all_forms_of_a_prompt_are_read(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def accepted(request_type: type[SamplingFields], body: dict[str, Any], name: str) -> Any:
    """The request, or None if this value of the field is refused. Asserts that an accepted value is kept as it was sent, that null means
    the default, and that a refusal is about this field or the request as a whole."""
    refused = refused_places(request_type, body)
    if refused is not None:
        assert refused <= {name}
        return None
    request = request_type.model_validate(body)
    assert as_json(sent_fields(request)[name]) == as_json(held(name, body[name]))
    try:
        params = request.params()
    except ForedraftError:
        return None
    if name in SAMPLING and body[name] is not None:
        assert getattr(params, name) == as_param(name, body[name])
    return request


def sent_fields(request: SamplingFields) -> dict[str, Any]:
    """The fields that the request was made with, by the names that clients use."""
    return request.model_dump(by_alias=True, exclude_unset=True, warnings=False)


def held(name: str, value: Any) -> Any:
    """A value in the form in which a request keeps it."""
    if name == "prompt":
        return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value
    return {int(key): bias for key, bias in value.items()} if name == "logit_bias" and value is not None else value


def as_param(name: str, value: Any) -> Any:
    """A value in the form in which SamplingParams keeps it."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "top_k" and not 0 <= value < 2**31:
        return 0
    return max(value, 1e-30) if name == "top_p" else value


def as_json(value: Any) -> str:
    """JSON text to compare values with: true differs from 1, 1 equals 1.0, and NaN equals NaN."""
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


@given(st.sampled_from(sorted(CompletionRequest.model_fields)), JSON)
def test_accepted_values_are_kept(name: str, value: Any) -> None:
    accepted(CompletionRequest, {"prompt": "hello", name: value}, name)


@given(st.sampled_from(sorted(ChatRequest.model_fields)), JSON)
def test_accepted_values_of_a_chat_reach_the_template(name: str, value: Any) -> None:
    request = accepted(ChatRequest, {"messages": CHAT, name: value}, name)
    if request is not None:
        assert request.template_messages() == CHAT
        if name == "chat_template_kwargs":
            assert as_json(request.template_args()) == as_json(value or {})
        elif name in ("add_generation_prompt", "continue_final_message") and value:
            assert request.template_args() == {name: True}


VALUES: dict[str, list[Any]] = {
    "stream": [True, False],
    "stop": ["a", ["a", "b"], []],
    "temperature": [0, 0.5, 1e4],
    "top_p": [1e-320, 1],
    "top_k": [-1, 2**40],
    "seed": [-(2**63), 2**64 - 1],
    "logit_bias": [{}, {"5": 1}],
    "guided_json": [{}, {"const": None}, "{}"],
    "speculative_tokens": [0, "auto"],
    "user": ["", "somebody"],
}


@pytest.mark.parametrize(("name", "value"), [(name, one) for name, values in VALUES.items() for one in values])
@pytest.mark.parametrize("request_type", [CompletionRequest, ChatRequest])
def test_these_values_are_accepted(request_type: Any, name: str, value: Any) -> None:
    """So that the two tests above do not pass by refusing everything."""
    body = {"prompt": "hello"} if request_type is CompletionRequest else {"messages": CHAT}
    assert accepted(request_type, {**body, name: value}, name) is not None


def test_messages_become_template_messages() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        tools=[{"type": "function", "function": {"name": "f", "strict": False}}],
        chat_template_kwargs={"thinks": True},
    )
    assert body.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    assert body.template_args() == {"thinks": True, "tools": [{"type": "function", "function": {"name": "f"}}]}


def test_tokenize_takes_a_prompt_or_messages() -> None:
    for bad in (
        {},
        {"prompt": "a", "messages": CHAT},
        {"prompt": "a", "tools": []},
        {"messages": CHAT, "add_special_tokens": True},
    ):
        with pytest.raises(ValidationError):
            TokenizeRequest.model_validate(bad)
